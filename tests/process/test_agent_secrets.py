"""What the agent knows to log in with is told nowhere."""

import json

import pytest

from agent.sandbox.lab.cluster import open_cluster
from agent.sandbox.lab.web import fetch
from tests.process.agent_process import PATIENCE, options, run, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


async def test_no_token_is_in_a_log_line_or_a_page():
    async with open_cluster(options("--log-level", "debug")) as opened:
        kubeconfig = json.loads(opened.places.kubeconfig.read_text())
        (user,) = kubeconfig["users"]
        token = user["user"]["token"]
        assert len(token) > 8
        cluster = await started(opened)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        pages = [
            (await fetch(cluster.web_address or "", path)).text
            for path in (
                "/",
                "/api/v1/status",
                "/api/v1/settings",
                "/readyz?verbose",
                "/metrics",
                "/version",
                "/nothing",
            )
        ]
        # A server that takes the token no more is told of, with the address and without the token.
        user["user"]["token"] = wrong = f"{token}-and-more"
        cluster.places.kubeconfig.write_text(json.dumps(kubeconfig))
        await cluster.kill_agent()
        await cluster.start_agent()
        assert await cluster.until(lambda: "answered 401" in said(cluster), PATIENCE)
        code = await cluster.stop_agent()

    assert 0 == code
    for secret in (token, wrong):
        assert secret not in said(cluster)
        assert [] == [page for page in pages if secret in page]


def said(cluster):
    return "\n".join(line.text for line in cluster.log)


def test_settings_are_shown_without_what_they_name(tmp_path):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("users: [{name: a, user: {token: s3cret}}]\n")

    shown = run("config", "show", "--origin", "--kubeconfig", str(kubeconfig))

    assert str(kubeconfig) in shown.stdout
    assert "s3cret" not in shown.stdout + shown.stderr
