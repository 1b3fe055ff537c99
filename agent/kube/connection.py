"""Where the API server is and who we are there: a kubeconfig, or the service account of a pod."""

import asyncio
import importlib
import importlib.util
import ssl
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from agent.errors import SettingsError, cap
from agent.kube.objects import inside, objects_in, text_in

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIBRARY = "kubernetes_asyncio"
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""The errors that the library's loader raises for a file of another shape."""


class Connection(msgspec.Struct, frozen=True):
    """How to reach the API server.

    Without `kubeconfig`: in-cluster, with the files of `service_account` and the variables
    KUBERNETES_SERVICE_HOST and _PORT of `environment`. `context`: the context of the kubeconfig;
    empty for its current one. `remedy`: what to do where a file of it cannot be used.
    """

    kubeconfig: Path | None = None
    service_account: Path = SERVICE_ACCOUNT
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    context: str = ""
    remedy: str = (
        "give the path of a readable kubeconfig for this node; inside a pod with a service account "
        "give none"
    )

    @property
    def source(self) -> str:
        """The file or directory that describes the connection, for messages."""
        return str(self.kubeconfig or self.service_account)


class Access(msgspec.Struct, frozen=True):
    """What requests need of the connection's files.

    - `configuration`: the library's, with the server and the credentials; it renews a token that is
      about to expire.
    - `transport`: TLS and proxy, as aiohttp takes them.
    - `aiohttp`: the module, which is loaded late.
    - `failures`: what the libraries raise where no answer comes.
    """

    configuration: Any
    transport: Mapping[str, Any]
    aiohttp: Any
    failures: tuple[type[Exception], ...]


def check(connection: Connection) -> None:
    """Check the files of the connection; it imports no library and uses no network.

    Raises SettingsError: a file is missing, unreadable, or not a kubeconfig.
    """
    if connection.kubeconfig is not None:
        _read_context(connection, connection.kubeconfig)
        return

    names = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    if not all(connection.environment.get(name) for name in names):
        raise SettingsError(
            "no kubeconfig is set and this is not a pod (KUBERNETES_SERVICE_HOST is unset)",
            remedy="set node.kubeconfig to the kubeconfig of this node",
        )

    for name in ("token", "ca.crt"):
        _text(connection, connection.service_account / name)


def default_namespace(connection: Connection) -> str:
    """The namespace of the kubeconfig's context or of this pod, like kubectl; else `default`.

    Raises SettingsError: a file is missing, unreadable, or not a kubeconfig.
    """
    own = connection.service_account / "namespace"
    if connection.kubeconfig is not None:
        found = text_in(_read_context(connection, connection.kubeconfig), "namespace")
    else:
        found = _text(connection, own).strip() if own.is_file() else ""
    return found or "default"


def _read_context(connection: Connection, path: Path) -> Mapping[str, object]:
    """The connection's context in its kubeconfig, or the current one. Raises SettingsError."""
    try:
        content: object = yaml.safe_load(_text(connection, path))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-32
        # Only the place, not the text of the error: a kubeconfig holds secrets.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise _unusable(connection, f"is not YAML{place}") from None

    parts = content if isinstance(content, dict) else {}
    name = connection.context or text_in(parts, "current-context")
    if not name:
        raise _unusable(connection, "has no current-context")
    contexts = {text_in(entry, "name"): entry for entry in objects_in(parts, "contexts")}
    if name not in contexts:
        known = ", ".join(cap(known, 64) for known in contexts) or "none"
        raise _unusable(connection, f"has no context {cap(name, 64)} (it has {known})")
    return inside(contexts[name], "context")


def _text(connection: Connection, path: Path) -> str:
    """The text of one of the connection's files. Raises SettingsError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may block for ever
            raise _unusable(connection, "is not a regular file", path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        # In the system's words, without the path.
        reason = cap(str(getattr(error, "strerror", None) or error), 128)
        raise _unusable(connection, f"cannot be read ({reason})", path) from error


def _unusable(connection: Connection, reason: str, path: Path | None = None) -> SettingsError:
    """The SettingsError for a file of the connection. `path`: which, if it has several."""
    return SettingsError(f"{path or connection.source}: {reason}", remedy=connection.remedy)


def load() -> None:
    """Import aiohttp, and kubernetes_asyncio without its 900 model modules (38 MB, 0.2 s).

    The first call blocks for about 0.1 s: run it on a thread.
    """
    if LIBRARY not in sys.modules:
        # The files of these packages import everything, and only Basic authentication, which no
        # Kubernetes since 1.19 accepts, uses urllib3. They are not executed.
        for name in (LIBRARY, f"{LIBRARY}.client", "urllib3"):
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ImportError(f"{name} is not installed; install kubernetes-asyncio")
            sys.modules[name] = importlib.util.module_from_spec(spec)

        # The two names that the library itself takes from them; the first only for annotations.
        module = importlib.import_module(f"{LIBRARY}.client.configuration")
        names = {"ApiClient": object, "Configuration": module.Configuration}
        vars(sys.modules[f"{LIBRARY}.client"]).update(names)

    for name in ("aiohttp", f"{LIBRARY}.config.kube_config"):
        importlib.import_module(name)


async def open_access(connection: Connection) -> Access:
    """Read the files of the connection. Raises SettingsError: they cannot be used."""
    check(connection)
    await asyncio.to_thread(load)
    aiohttp = importlib.import_module("aiohttp")
    kube_config = importlib.import_module(f"{LIBRARY}.config.kube_config")
    failures = (
        *(OSError, SettingsError, kube_config.ConfigException),  # TimeoutError is an OSError
        *(aiohttp.ClientError, aiohttp.http_exceptions.LineTooLong),
    )
    configuration = importlib.import_module(f"{LIBRARY}.client.configuration").Configuration()
    configuration.host = ""

    try:
        if connection.kubeconfig is None:
            importlib.import_module(f"{LIBRARY}.config.incluster_config").load_incluster_config(
                configuration,
                token_filename=str(connection.service_account / "token"),
                cert_filename=str(connection.service_account / "ca.crt"),
                environ=dict(connection.environment),
            )
        else:
            await kube_config.load_kube_config(
                config_file=str(connection.kubeconfig),
                context=connection.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
        transport = _transport(configuration)
    # failures: also of an identity provider of the kubeconfig that does not answer
    except (*failures, *UNUSABLE) as error:
        reason = f"cannot be used ({cap(str(error) or type(error).__name__, 128)})"
        raise _unusable(connection, reason) from error

    if not configuration.host:
        raise _unusable(connection, "names no server for its current-context")
    return Access(configuration, transport, aiohttp, failures)


def _transport(configuration: Any) -> Mapping[str, Any]:  # noqa: ANN401 -- untyped library
    """TLS and proxy for each request, as RESTClientObject of the library sets them up."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return {
        "ssl": context,
        "server_hostname": configuration.tls_server_name,
        "proxy": configuration.proxy,
    }
