"""The image runs as the DaemonSet runs it: nothing to write to, no capability, not even a user."""

import json

import pytest

from agent import __version__
from tests.image.lab.bundle import Bundle

PATIENCE = 60.0


def test_it_says_its_version(bundle: Bundle):
    said = bundle.run("version", "-o", "json")

    assert (0, "") == (said.returncode, said.stderr)
    assert __version__ == json.loads(said.stdout)["version"]
    assert json.loads(said.stdout)["python"].startswith("3.13.")


def test_it_looks_at_a_node_before_it_serves_one(bundle: Bundle):
    looked = bundle.run("doctor", "--pre", "-o", "json", "--simulate", "h100:2")

    findings = json.loads(looked.stdout)["findings"]
    found = {one["id"]: one["verdict"] for one in findings}
    assert (1, "ok", "wrong") == (looked.returncode, found["P-DRIVER"], found["P-KUBELET"])
    # Nothing is writable here, /tmp neither.
    assert "does not exist and cannot be created" in {one["said"] for one in findings}


@pytest.mark.parametrize("uid", [None, 0], ids=["nobody", "root"])
def test_every_claim_of_the_sandbox_holds_inside(bundle: Bundle, uid: int | None):
    played = bundle.run("sandbox", writable=["/tmp"], uid=uid)  # noqa: S108 -- inside the container

    assert 0 == played.returncode, played.stdout + played.stderr
    assert "kube.lazy_import_failed" not in played.stdout + played.stderr


def test_a_stop_is_heeded_though_the_agent_is_the_first_process(bundle: Bundle):
    places = ["/var/lib/hami-agent", "/run/hami-agent", "/var/lib/kubelet", "/usr/local/vgpu"]
    command = ["run", "--simulate", "h100:2", "--scheduler", "none", "--node-name", "n"]
    with bundle.started(*command, writable=places) as container:
        output = container.process.stderr
        assert output is not None
        lines = [output.readline()]
        while lines[-1] and "registration.waiting" not in lines[-1]:
            lines.append(output.readline())
        container.kill("TERM")
        _, rest = container.process.communicate(timeout=PATIENCE)

    assert 0 == container.process.returncode, "".join([*lines, rest])
    assert "agent.stopped" in rest
