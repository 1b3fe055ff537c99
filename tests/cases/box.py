"""What the cases share: a sandbox, a lab, the machine of the random histories, the verdict.

A case is a script with a small instance of a fault that the agent had. It prints what it saw. Its
last line is "VERDICT right" (exit code 0), "VERDICT wrong: why" (1), or "VERDICT none: why" (2): it
could not run, because something that it uses has moved. From the root of the repository:

    .venv/bin/python tests/cases/NAME.py
"""

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import structlog

import tests.machine.agent_life as life
from agent.hami.region import MAGIC, V1_2
from agent.ledger import Row
from agent.sandbox.lab.cluster import NAMESPACE, RESOURCE, SandboxCluster, open_cluster
from agent.state import decode_state
from tests.machine.pods import Shape
from tests.machine.sides import VirtualClock, VirtualLoop
from tests.machine.world import MachineWorld
from tests.process.agent_process import ENVIRON, ROOT, options

AGENT = (sys.executable, "-m", "agent")
LIMIT = 300
"""Seconds that a case may take."""


def verdict(*, right: bool, wrong: str) -> NoReturn:
    """End the case: `right` is whether the agent does what it should; `wrong` is what it did."""
    print("VERDICT right" if right else f"VERDICT wrong: {wrong}", flush=True)
    raise SystemExit(0 if right else 1)


def _crashed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    traceback.print_exception(kind, error, trace, file=sys.stdout)
    print(f"VERDICT none: {kind.__name__}: {str(error)[:200]}", flush=True)
    os._exit(2)  # threads of the sandbox may be left


def _late(*_: object) -> NoReturn:
    raise TimeoutError(f"the case took longer than {LIMIT} s")


sys.excepthook = _crashed
signal.signal(signal.SIGALRM, _late)
signal.alarm(LIMIT)


def run_agent(*words: object, memory: int = 0, timeout: float = 90) -> tuple[int, str]:
    """Exit code, and standard output and error together, of a verb; `memory`: bytes it may have."""

    def limit() -> None:
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    done = subprocess.run(
        [*AGENT, *map(str, words)],
        cwd=ROOT,
        env=ENVIRON | {"COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
        preexec_fn=limit,
    )
    return done.returncode, done.stdout


def quiet() -> None:
    """Let the agent in this process log nothing."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


class CaseSandbox:
    """`hami-agent sandbox`: the real agent, with models of kubelet, API server, scheduler, GPUs."""

    def __init__(self, *flags: str, gpus: int = 3) -> None:
        self._flags = ("--gpus", str(gpus), *flags)
        self._text = ""
        self.dir = Path()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*AGENT, "sandbox", "--interactive", *self._flags],
            cwd=ROOT,
            env=ENVIRON | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self._read()
        except BaseException:
            self.__exit__()
            raise
        threading.Thread(target=self._drain, daemon=True).start()
        return self

    def _read(self) -> None:
        """Read what the sandbox prints of itself."""
        for line in self._process.stdout:
            self._text += line
            if "get node sandbox -o yaml" in line:
                break

        def find(pattern: str) -> str:
            if found := re.search(pattern, self._text):
                return found[1]
            raise RuntimeError(f"the sandbox did not print {pattern}: {self._text[-800:]}")

        self.dir = Path(find(r"directory\s+(\S+)"))
        self.web = find(r"web\s+(http://\S+)")
        self.gpus = find(r"--socket (\S+gpus.sock)")
        self.socket = find(r"unix\s+(\S+)")
        self.doctor = find(r" (doctor --.*)").split()
        self.kubeconfig = self.dir / "kubectl.config"
        config = json.loads(self.kubeconfig.read_text())
        self.api = config["clusters"][0]["cluster"]["server"]

    def _drain(self) -> None:
        for _ in self._process.stdout:
            pass

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        if self.dir != Path():
            shutil.rmtree(self.dir, ignore_errors=True)

    def run(self, *words: str) -> str:
        """What a verb prints, on standard output and error together."""
        done = subprocess.run(
            [*AGENT, *words],
            cwd=ROOT,
            env=ENVIRON | {"KUBECONFIG": str(self.kubeconfig), "COLUMNS": "160"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
            check=False,
        )
        return done.stdout

    def simulate(self, *words: str) -> str:
        """Do something to the GPUs."""
        return self.run("simulate", "--socket", self.gpus, *words)

    def request(self, method: str, path: str, body: object = None) -> Any:
        """The API server's answer; the text of an error."""
        request = urllib.request.Request(
            self.api + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=15) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def get(self, path: str) -> str:
        """A page of the agent."""
        with urllib.request.urlopen(self.web + path, timeout=15) as answer:
            return answer.read().decode()

    def node(self) -> Any:
        """The Node."""
        return self.request("GET", "/api/v1/nodes/sandbox")

    def gpu_uuid(self, index: int) -> str:
        """The UUID of a GPU, from the register annotation."""
        register = self.node()["metadata"]["annotations"]["hami.io/node-nvidia-register"]
        return json.loads(register)[index]["id"]

    def create(self, pod: object) -> None:
        """Create a pod."""
        self.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)

    def delete(self, name: str) -> None:
        """Delete a pod by force."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}?gracePeriodSeconds=0"
        self.request("DELETE", path)

    def wait(self, name: str) -> Any:
        """The pod once it runs or has ended."""

        def pod() -> Any:
            return self.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")

        self.until(lambda: pod()["status"].get("phase") in {"Running", "Failed", "Succeeded"})
        return pod()

    def until(self, holds: Callable[[], object], seconds: float = 40) -> None:
        """Wait until it holds, or for so many seconds."""
        end = time.monotonic() + seconds
        while not holds() and time.monotonic() < end:
            time.sleep(0.2)

    def answer(self, uid: str) -> bytes:
        """The agent's answer for a pod of one container, from the kubelet's own checkpoint."""
        file = self.dir / "device-plugins" / "kubelet_internal_checkpoint"
        entries = json.loads(file.read_text())["Data"]["PodDeviceEntries"]
        (answer,) = (one["AllocResp"] for one in entries if one["PodUID"] == uid)
        return base64.b64decode(answer)

    def metrics(self, gpu: int) -> dict[str, float]:
        """The sums of the agent's series of a GPU, by name."""
        sums: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if f'gpu="{gpu}"' in line:
                name = line.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(line.split()[-1])
        return sums


def a_container(
    name: str = "main", *, slices: int = 1, is_sidecar: bool = False, **amounts: int
) -> Any:
    """A container with limits, such as mem=500 or mem_percentage=40."""
    limits = {RESOURCE + key.replace("_", "-"): str(amount) for key, amount in amounts.items()}
    plain = {"name": name, "image": "x", "resources": {"limits": {RESOURCE: str(slices)} | limits}}
    return plain | ({"restartPolicy": "Always"} if is_sidecar else {})


def a_pod(name: str, *containers: Any, init: Sequence[Any] = (), gpu: str = "") -> Any:
    """A pod of these containers; `gpu` is the UUID of the only one that it takes."""
    notes = {"nvidia.com/use-gpuuuid": gpu} if gpu else {}
    meta = {"name": name, "namespace": NAMESPACE, "annotations": notes}
    spec = {"initContainers": list(init), "containers": list(containers)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


@contextlib.asynccontextmanager
async def a_lab(*flags: str, gpus: int) -> AsyncIterator[SandboxCluster]:
    """The models in this process, and the agent as a process that the case starts and kills."""
    quiet()
    async with open_cluster(options(*flags, gpus=gpus)) as cluster:
        yield cluster


def lab_rows(cluster: SandboxCluster) -> Sequence[Row]:
    """The rows of the agent's ledger in the lab."""
    return decode_state((cluster.places.state / "state.json").read_bytes()).ledger.rows


def put_region(hook: Path, name: str, raw: bytes) -> Path:
    """Write the region of the container directory of that name, as its processes can."""
    file = hook / "vgpu/containers" / name / "case.cache"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_bytes(raw)
    file.chmod(0o666)
    return file


def a_raw_region(
    gpus: Sequence[tuple[str, int, int]],
    processes: Sequence[tuple[int, int]] = (),
    *,
    recent: int = 0,
    priority: int = 1,
    last: int = 0,
    is_odd: bool = False,
) -> bytes:
    """A region: each GPU's UUID, memory and core limit; each process's bytes and SM percent."""
    raw = bytearray(V1_2.size + 1)
    struct.pack_into("<iII", raw, 0, MAGIC, *(V1_2.version or ()))
    struct.pack_into("<Q", raw, V1_2.gpu_count, len(gpus))
    for index, (uuid, memory, cores) in enumerate(gpus):
        struct.pack_into("96s", raw, V1_2.uuids + 96 * index, uuid.encode())
        struct.pack_into("<Q", raw, V1_2.memory_limits + 8 * index, memory)
        struct.pack_into("<Q", raw, V1_2.core_limits + 8 * index, cores)
    for slot, (used, sm) in enumerate(processes):
        at = V1_2.slots + slot * V1_2.slot_size
        struct.pack_into("<i", raw, at, slot + 1)
        struct.pack_into("<i", raw, at + V1_2.status, 1)
        struct.pack_into("<Q", raw, at + (V1_2.seqlock or 0), int(is_odd))
        for gpu in range(len(gpus)):
            numbers = at + V1_2.used + gpu * V1_2.memory_size
            struct.pack_into("<qqqqq", raw, numbers, used, used, used, 0, used)
            percent = at + V1_2.utilisation + gpu * V1_2.utilisation_size + 16
            struct.pack_into("<Q", raw, percent, sm)
    struct.pack_into("<iiii", raw, V1_2.tail, len(processes), 0, recent, priority)
    struct.pack_into("<Q", raw, V1_2.tail + 16, last)
    return bytes(raw)


def recent_kernel(region: Path) -> int:
    """Negative: launches are held back."""
    number: int = struct.unpack_from("<i", region.read_bytes(), V1_2.tail + 8)[0]
    return number


async def ran(cluster: SandboxCluster, pod: Any, seconds: float) -> Any:
    """The status of a pod, new in the lab, once it runs or failed, or after so many seconds."""
    cluster.submit(pod)
    name = pod["metadata"]["name"]
    await cluster.until(
        lambda: cluster.pod(name)["status"].get("phase") in {"Running", "Failed"}, seconds
    )
    return cluster.pod(name)["status"]


class CaseWorld(MachineWorld):
    split = 10

    async def run_pod(self, name: str, shape: Shape) -> str:
        """The UID of a new pod, which runs: HAMi's scheduler may need several tries."""
        uid = self.create(name, shape)
        assert uid is not None
        for _ in range(100):
            await self.scheduler.schedule(uid)
            await asyncio.sleep(1)
            if any(one == uid for one, _ in self.running()):
                return uid
        raise AssertionError(f"the scheduler placed no pod {name}")


def machine(play: Callable[[MachineWorld], Coroutine[Any, Any, Any]], seed: int) -> Any:
    """What `play(world)` returns, in virtual time, in models around the agent's own services."""
    quiet()

    async def main() -> Any:
        world = CaseWorld(seed, VirtualClock(asyncio.get_running_loop()), life.start_agent)
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            living = group.create_task(world.run(ready))
            await ready.wait()
            try:
                return await play(world)
            finally:
                living.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def refusals(text: str) -> list[str]:
    """The ids of refusals in a text."""
    return re.findall(r"HA-\d+", text)
