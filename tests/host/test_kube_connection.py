"""Where the connection is described, and what is said when it cannot be used."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import SettingsError
from agent.kube.client import Connection, check, default_namespace, open_access
from tests.fakes.kubeworld import KUBECONFIG

CERTIFICATE = Path(__file__).parents[1] / "vectors" / "tls" / "one.crt"
IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
GOOD = KUBECONFIG.format(server="https://api.test:6443", token="secret")  # noqa: S106 -- a test


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "kubeconfig").write_text(GOOD)
    return tmp_path / "kubeconfig"


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The files of a service account."""
    (tmp_path / "token").write_text("first")
    shutil.copy(CERTIFICATE, tmp_path / "ca.crt")
    return tmp_path


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"a: [", "is not YAML: give"),
        (b"a: \x00", "is not YAML: give"),
        (b"", "has no current-context"),
        (b"- a list", "has no current-context"),
        (b"current-context: x\ncontexts: none", "has no context x: give"),
        (b"current-context: x\ncontexts: [{name: y}]", "has no context x: give"),
        (("current-context: x", ""), "has no current-context"),
        (("current-context: x", "current-context: [x]"), "has no current-context"),
        (("current-context: x", "a: 2026-13-32"), "is not YAML: give"),
        (("current-context: x", "current-context: y"), "has no context y"),
        (("cluster: c,", "cluster: d,"), "cannot be used"),
        (("{server:", "{serverless:"), "names no server"),
        (("users: [", "users: [7, "), "cannot be used"),
        (("contexts: [", "contexts: 3 # ["), "has no context x"),
        (("{token:", "{exec: 5, token:"), "cannot be used"),
        (("{token:", "{tokenFile: /nowhere/at-all, x:"), "cannot be used"),
    ],
)
async def test_a_useless_kubeconfig_is_named_with_the_mend(path, content, reason):
    """A pair: a good one with the first text replaced by the second."""
    if isinstance(content, tuple):
        assert content[0] in GOOD
        content = GOOD.replace(*content).encode()
    path.unlink() if content is None else path.write_bytes(content)

    with pytest.raises(SettingsError) as raised:
        await open_access(Connection(path))

    assert str(raised.value).startswith(f"{path}: {reason}")
    assert "give the path of a readable kubeconfig" in str(raised.value)


@pytest.mark.parametrize(
    "secret", ["token: s3cret: x", 'token: "s3cret', "- s3cret\ntoken: s3cret"]
)
def test_what_stands_in_a_broken_kubeconfig_is_not_told(path, secret):
    path.write_text(f"users:\n  {secret}\n")

    with pytest.raises(SettingsError) as raised:
        check(Connection(path))

    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("is_in_pod", "server", "token"),
    [(False, "https://api.test:6443", "secret"), (True, "https://10.0.0.1:443", "first")],
)
async def test_a_kubeconfig_or_a_pods_account_gives_server_and_token(
    path, account, is_in_pod, server, token
):
    in_pod = Connection(service_account=account, environment=IN_CLUSTER)
    found = (await open_access(in_pod if is_in_pod else Connection(path))).configuration

    assert (server, f"Bearer {token}") == (
        found.host,
        await found.get_api_key_with_prefix("BearerToken"),
    )
    assert not is_in_pod or str(account / "ca.crt") == found.ssl_ca_cert


@pytest.mark.parametrize(
    ("contexts", "name", "namespace"),
    [
        ("[{name: x, context: {namespace: a}}]", "", "a"),
        ("[{name: x, context: {}}, {name: y, context: {namespace: b}}]", "y", "b"),
        ("[{name: x, context: {namespace: [a]}}]", "", "default"),
        ("[{name: [x]}, x, {context: {}}, {name: x}]", "", "default"),
    ],
)
def test_the_namespace_is_that_of_the_context(path, contexts, name, namespace):
    path.write_text(f"clusters: [{{}}]\ncurrent-context: x\ncontexts: {contexts}\n")

    assert namespace == default_namespace(Connection(path, context=name))


def test_inside_a_pod_the_namespace_is_the_pods(account: Path):
    connection = Connection(service_account=account, environment=IN_CLUSTER)

    assert "default" == default_namespace(connection)
    (account / "namespace").write_text("team-a\n")
    assert "team-a" == default_namespace(connection)
    (account / "namespace").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="namespace: cannot be read"):
        default_namespace(connection)


def test_outside_of_a_pod_and_without_a_kubeconfig_the_mend_is_named(account: Path):
    with pytest.raises(SettingsError, match="no kubeconfig is set and this is not a pod"):
        check(Connection(service_account=account))


@pytest.mark.parametrize(("name", "content"), [("token", None), ("ca.crt", b""), ("token", b"")])
async def test_a_broken_service_account_is_named(account, name, content):
    path = account / name
    path.unlink() if content is None else path.write_bytes(content)

    with pytest.raises(SettingsError, match=str(account)):
        await open_access(Connection(service_account=account, environment=IN_CLUSTER))


LOAD = """
import sys
from agent.kube import client
client.load()
client.load()
configuration = sys.modules["kubernetes_asyncio.client.configuration"].Configuration()
assert configuration.connection_pool_maxsize == 100
names = [name for name in sys.modules if name.startswith("kubernetes_asyncio")]
assert len(names) < 20, names
assert not sys.modules.keys() & {"dateutil", "urllib3.util"}
"""
"""kubernetes_asyncio, without its models."""


@pytest.mark.process
@pytest.mark.timeout(60)
def test_a_lazy_load_takes_a_handful_of_modules_and_nothing_that_no_request_uses():
    assert "36" == importlib.metadata.version("kubernetes-asyncio").split(".")[0], "tried with it"
    subprocess.run([sys.executable, "-c", LOAD], check=True)  # noqa: S603 -- our own
