"""The image runs as the DaemonSet runs it: nothing to write to, no capability, not even a user."""

import json
import re

import pytest

from agent import __version__
from tests.image.lab.bundle import Bundle

PATIENCE = 60.0
PLACES = ["/var/lib/hami-agent", "/run/hami-agent", "/var/lib/kubelet", "/usr/local/vgpu"]
RUN = ["run", "--simulate", "h100:2", "--scheduler", "none", "--node-name", "n"]


def test_it_says_its_version(bundle):
    said = bundle.run("version", "-o", "json")

    assert (0, "") == (said.returncode, said.stderr)
    assert __version__ == json.loads(said.stdout)["data"]["version"]
    assert json.loads(said.stdout)["data"]["python"].startswith("3.13.")


def test_it_has_the_runbook(bundle):
    said = bundle.run("runbook", "HA-4002")

    assert (0, "") == (said.returncode, said.stderr)
    assert said.stdout.startswith("HA-4002 The GPU is bad or lost\n")


def test_it_looks_at_a_node_before_it_serves_one(bundle):
    looked = bundle.run("doctor", "--pre", "-o", "json", "--simulate", "h100:2")

    findings = json.loads(looked.stdout)["data"]["findings"]
    found = {one["id"]: one["verdict"] for one in findings}
    assert (1, "ok", "wrong") == (looked.returncode, found["P-DRIVER"], found["P-KUBELET"])
    # Nothing is writable here, /tmp neither.
    said = {one["said"] for one in findings}
    assert "does not exist and cannot be created: Read-only file system" in said


@pytest.mark.parametrize("uid", [None, 0], ids=["nobody", "root"])
def test_every_claim_of_the_sandbox_holds_inside(bundle, uid):
    played = bundle.run("sandbox", writable=["/tmp"], uid=uid)  # noqa: S108 -- inside the container

    assert 0 == played.returncode, played.stdout + played.stderr


def test_a_stop_is_heeded_though_the_agent_is_the_first_process(bundle):
    code, said = run_until(bundle, "registration.waiting")

    assert 0 == code, said
    assert "agent.stopped" in said.partition("registration.waiting")[2]


def test_no_variable_of_python_reaches_it(bundle):
    said = bundle.run("version", PYTHONHOME="/nowhere", PYTHONPATH="/nowhere")

    assert (0, "") == (said.returncode, said.stderr)


def test_a_start_compiles_nothing(bundle):
    code, said = run_until(bundle, "web.listening", "/opt/hami-agent/bin/python3", "-Iv")

    assert 0 == code, said
    assert "/agent/app/__pycache__/agent." in said
    assert [] == re.findall(r"^# code object from (/.*\.py)$", said, re.MULTILINE)


def run_until(bundle: Bundle, event: str, *under: str) -> tuple[int, str]:
    """The exit code and the log of an agent that is told to stop once it has said that."""
    with bundle.started(*RUN, under=under, writable=PLACES) as container:
        output = container.process.stderr
        assert output is not None
        lines = [output.readline()]
        while lines[-1] and f'"{event}"' not in lines[-1]:
            lines.append(output.readline())
        container.kill("TERM")
        _, rest = container.process.communicate(timeout=PATIENCE)
    return container.process.returncode, "".join([*lines, rest])
