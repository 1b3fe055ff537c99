"""Rules of `doctor`: what a host must have for the agent, and the rights that the agent needs."""

import errno
import os
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from agent.allocate.edits import NOT_LOADABLE, misnamed, mounted_library
from agent.kit.units import counted
from agent.ledger import HookFacts
from agent.model import Scan
from agent.node.findings import NO_OFFER, OF_ONE_GPU, Finding, Verdict, When, judged


class Right(msgspec.Struct, frozen=True):
    """One permission: a verb on a resource."""

    verb: str
    resource: str

    name: str = ""
    """The object; empty: any object."""

    namespace: str = ""

    selector: str = ""
    """The field selector of the request."""

    @property
    def words(self) -> str:
        """Verb and resource, as in a ClusterRole."""
        return f"{self.verb} {self.resource}"

    @property
    def reads(self) -> bool:
        """Whether the verb only reads."""
        return self.verb in {"get", "list", "watch"}


def rights(node: str, *, node_condition: bool = False) -> tuple[Right, ...]:
    """The permissions that the agent on `node` needs, except the GET of a pod (`right_to_get`).

    `node_condition`: the agent writes the Node condition GpuDegraded.
    """
    condition = (Right("patch", "nodes/status", name=node),) if node_condition else ()
    return (
        Right("get", "nodes", name=node),
        Right("watch", "nodes", name=node),
        Right("patch", "nodes", name=node),
        Right("list", "pods", selector=f"spec.nodeName={node}"),
        Right("watch", "pods", selector=f"spec.nodeName={node}"),
        Right("patch", "pods/status"),
        Right("create", "events"),
        Right("patch", "events"),
        *condition,
    )


def right_to_get(pod: tuple[str, str]) -> Right:
    """The permission to GET a pod (namespace, name) of this node.

    It needs the name, because a node's own identity may read only the pods of its node.
    """
    return Right("get", "pods", namespace=pod[0], name=pod[1])


UNNEEDED: Final = (
    Right("list", "nodes"),
    Right("delete", "nodes"),
    Right("patch", "pods"),
    Right("create", "pods/exec"),
    Right("create", "pods/binding"),
    Right("list", "secrets"),
    Right("list", "configmaps"),
    Right("impersonate", "users"),
)
"""Rights that neither the agent's ClusterRole nor a node's own identity has."""

# Paths, the kubelet, other plugins, HAMi's files.


class PathFacts(msgspec.Struct, frozen=True):
    """The state of a path."""

    path: str

    kind: str
    """Directory, socket, file or another; empty: it does not exist."""

    owner: int = 0
    mode: int = 0

    failure: int = 0
    """Why nothing can be written there, or why a missing path cannot be created; 0: it can."""

    ours: bool = True
    """Its owner is root or the agent's user."""


class PluginSocket(msgspec.Struct, frozen=True):
    """A socket of a plugin in the kubelet's directory."""

    path: str

    alive: bool
    """A process listens on it."""

    @property
    def theirs(self) -> bool:
        """True if the socket has a name of HAMi's or NVIDIA's plugin."""
        return self.path.rpartition("/")[2].startswith("nvidia-")


REPAIRS: Final = {
    errno.EROFS: "mount it read-write; if the kernel made the disk read-only (dmesg), repair it",
    errno.ENOSPC: "free some space or inodes there",
}
"""What to do about a directory that cannot be written."""


def judge_path(place: PathFacts, check: str = "P-PATHS", *, made: bool) -> Finding:
    """Judge a directory that the agent writes to. `made`: the agent creates it if missing."""
    is_missing, chown = not place.kind and made, f"chown root and chmod 0755 {place.path}"
    means = "who may write there can replace the sockets, or the limits of containers"
    mode, why = f"mode {place.mode:04o}", os.strerror(place.failure)

    return judged(
        check,
        place.path,
        "can be written, only by its owner or a group",
        When(is_missing and not place.failure, "ok", "does not exist: the agent creates it"),
        When(
            is_missing,
            "wrong",
            f"does not exist and cannot be created: {why}",
            "create it, or mount it read-write",
        ),
        When(
            place.kind != "directory",
            "wrong",
            f"is a {place.kind}" if place.kind else "does not exist",
            "mount or create the directory there",
        ),
        When(not place.ours, "wrong", f"belongs to uid {place.owner}", chown, means),
        When(
            bool(place.mode & 0o002), "wrong", f"every user may write there ({mode})", chown, means
        ),
        When(
            bool(place.failure),
            "wrong",
            f"cannot be written: {why} (owner {place.owner}, {mode})",
            REPAIRS.get(place.failure, "run as its owner, and mount it read-write"),
        ),
    )


REPAIR: Final = (
    "the driver is there but fails: look with nvidia-smi and for NVRM in the kernel's log (dmesg); "
    "then reload the driver or reboot"
)


def judge_driver(
    library: str, scan: Scan | None, failure: str, remedy: str | None = None
) -> Iterator[Finding]:
    """Judge NVIDIA's library, and name each GPU that will not be shared.

    `failure`: why there is no scan. `remedy`: what to do about it, if known.
    """
    if scan is None:
        yield Finding("P-DRIVER", "wrong", library, failure, REPAIR if remedy is None else remedy)
        return

    if scan.gpus:
        models = ", ".join(sorted({gpu.name for gpu in scan.gpus}))
        well = f"driver {scan.driver_version}, {counted(len(scan.gpus), 'GPU')}: {models}"
        yield Finding("P-DRIVER", "ok", library, well)
    else:
        said = f"driver {scan.driver_version} answers but describes no GPU"
        advice = "see the notes on each GPU below" if scan.faults else "look with nvidia-smi -L"
        yield Finding("P-DRIVER", "wrong", library, said, advice)

    left = [
        (f"GPU {gpu.uuid} is in MIG mode", "it will not be shared")
        for gpu in scan.gpus
        if gpu.mig_enabled
    ]
    left += [(fault.sentence, f"it is not shared; {fault.remedy}") for fault in scan.faults]
    for said, advice in left:
        yield Finding("P-DRIVER", "note", library, said, advice, OF_ONE_GPU)


def judge_plugins(
    directory: PathFacts,
    sockets: Sequence[PluginSocket],
    pods: Sequence[str] = (),
    *,
    reported: bool,
    takeover: bool,
) -> Iterator[Finding]:
    """Judge other plugins for these GPUs that run, and HAMi's vGPUmonitor.

    `pods`: those of other plugins here. `reported`: HAMi's plugin wrote its report on the Node.
    `takeover`: the agent is set to serve beside them.
    """
    running = [(f"pod {pod}", "another device plugin runs on this node") for pod in pods]
    running += [
        (socket.path, "another device plugin answers here")
        for socket in sockets
        if socket.theirs and socket.alive
    ]

    verdict: Verdict = "note" if takeover else "wrong"
    advice = (
        "with takeover the agent takes the resource from it; remove it from this node right after"
        if takeover
        else "remove it from this node first: two plugins for one resource take it from each other"
    )

    for subject, said in running:
        yield Finding("P-PLUGIN", verdict, subject, said, advice)

    if not running and directory.kind == "directory":
        yield Finding("P-PLUGIN", "ok", directory.path, "no other plugin for these GPUs answers")

    if running or reported:
        yield Finding(
            "P-MONITOR",
            "note",
            "HAMi's vGPUmonitor",
            "when HAMi's DaemonSet is switched off (devicePlugin.enabled=false), its vGPUmonitor "
            "goes with it, and the Service on port 31992",
            "the agent serves the same metrics; let Prometheus ask its port, or open 31992 again "
            "(see deploy/README.md)",
        )


def judge_library_files(
    library: PathFacts, preload: PathFacts, facts: HookFacts
) -> Sequence[Finding]:
    """Judge libvgpu.so and ld.so.preload, which exist. `facts`: what check_library() judges."""
    until, mounted = "until then no slice is on offer (HA-5005)", mounted_library(facts)
    code = "who may write this file can run code in every new container with a GPU"
    found = [
        judged(
            "P-PRELOAD",
            file.path,
            f"{preload.path} names it; only its owner may write both",
            When(not file.kind, "unknown", "was removed during this check", "run it again"),
            When(
                file.kind != "file",
                "unknown",
                f"is a {file.kind}, and no regular file",
                "run this check as root",
            ),
            When(
                not file.ours or bool(file.mode & 0o022),
                "wrong",
                f"others than root may write it (uid {file.owner}, mode {file.mode:04o})",
                f"chown root and chmod go-w {file.path}; then put HAMi-core's file there again",
                code,
            ),
            When(
                not file.mode & 0o004,
                "wrong",
                f"not everybody may read it (mode {file.mode:04o})",
                "make it 0644",
                "containers of other users have no limits",
            ),
        )
        for file in (library, preload)
    ]

    if not facts.loadable:
        advice = f"put HAMi-core's file there; {until}"
        found.append(Finding("P-PRELOAD", "wrong", library.path, NOT_LOADABLE, advice, NO_OFFER))

    if names := misnamed(facts):
        said, advice = f"names {names} and not {mounted}", f"make {mounted} its only line; {until}"
        found.append(Finding("P-PRELOAD", "wrong", preload.path, said, advice, NO_OFFER))

    return [one for one in found if one.verdict != "ok"] or found[:1]
