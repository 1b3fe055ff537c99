"""Finds the API server and our identity there: by a kubeconfig file or the service account."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.core.errors import SettingsError, cap
from agent.host.kube.shim import Library

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECTIONS = 16
"""Two watches, and two requests of each verb and resource that the agent uses.

These are get and patch of nodes, get, list and patch of pods, create and patch of events.
"""
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""The errors that the library's loader raises for a file of another shape."""


class Connection(msgspec.Struct, frozen=True):
    """How to reach the API server.

    Without `kubeconfig`: in-cluster, with the files of `service_account` and the variables
    KUBERNETES_SERVICE_HOST and _PORT of `environment`. `context`: the context of the kubeconfig;
    empty for its current one.
    """

    kubeconfig: Path | None = None
    service_account: Path = SERVICE_ACCOUNT
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    context: str = ""

    @property
    def source(self) -> str:
        """The file or directory that describes the connection, for messages."""
        return str(self.kubeconfig or self.service_account)


def check(connection: Connection) -> None:
    """Check the files of the connection; it imports no library and uses no network.

    Raises SettingsError: a file is missing, unreadable, or not a kubeconfig.
    """
    if connection.kubeconfig is None:
        _check_service_account(connection)
        return
    _read_context(connection.kubeconfig, connection.context)


def default_namespace(connection: Connection) -> str:
    """The namespace of the kubeconfig's context or of this pod, like kubectl; else `default`.

    Raises SettingsError: a file is missing, unreadable, or not a kubeconfig.
    """
    if connection.kubeconfig is None:
        own = connection.service_account / "namespace"
        try:
            return own.read_text(encoding="utf-8").strip() or "default"
        except FileNotFoundError:
            return "default"
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(own, f"cannot be read ({cap(str(error), 128)})") from error
    namespace = _read_context(connection.kubeconfig, connection.context).get("namespace")
    return namespace if isinstance(namespace, str) and namespace else "default"


def _read_context(path: Path, name: str) -> Mapping[str, object]:
    """The named context of the file, or its current one. Raises SettingsError."""
    import yaml  # noqa: PLC0415 -- late: in a pod there is no kubeconfig

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may block for ever
            raise _unusable(path, "is not a regular file")
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, f"cannot be read ({cap(str(error), 128)})") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-32
        raise _unusable(path, f"is not YAML{_place(error)}") from None
    if not isinstance(content, dict) or not content.get("clusters"):
        raise _unusable(path, "names no cluster")
    wanted = name or content.get("current-context")
    if not wanted or not isinstance(wanted, str):
        raise _unusable(path, "has no current-context")
    entries = content.get("contexts")
    contexts = {
        entry.get("name"): entry.get("context")
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    }
    if name and name not in contexts:
        known = ", ".join(cap(str(known), 64) for known in contexts)
        raise _unusable(path, f"has no context {cap(name, 64)} (it has {known or 'none'})")
    context = contexts.get(wanted)
    return context if isinstance(context, dict) else {}


async def configure(library: Library, connection: Connection) -> Any:  # noqa: ANN401 -- untyped library
    """The library's Configuration for this connection. Raises SettingsError."""
    check(connection)
    configuration = library.configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    configuration.host = ""
    try:
        if connection.kubeconfig is None:
            library.load_incluster_config(
                configuration,
                token_filename=str(connection.service_account / "token"),
                cert_filename=str(connection.service_account / "ca.crt"),
                environ=dict(connection.environment),
            )
        else:
            await library.load_kube_config(
                config_file=str(connection.kubeconfig),
                context=connection.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
    except library.config_errors + UNUSABLE as error:
        raise unusable(connection, error) from error
    if not configuration.host:
        raise _unusable(Path(connection.source), "names no server for its current-context")
    return configuration


def unusable(connection: Connection, error: Exception) -> SettingsError:
    """The SettingsError for a connection that the libraries cannot use."""
    reason = f"cannot be used ({cap(str(error) or type(error).__name__, 128)})"
    return _unusable(Path(connection.source), reason)


def fingerprint(configuration: Any) -> tuple[object, ...]:  # noqa: ANN401 -- untyped library
    """The inputs of the TLS context: if they are equal, the open client is still right."""
    fields = ("host", "verify_ssl", "tls_server_name", "proxy")
    files = ("ssl_ca_cert", "cert_file", "key_file")
    return (
        *(getattr(configuration, field) for field in fields),
        *(_stamp(getattr(configuration, field)) for field in files),
    )


def _place(error: Exception) -> str:
    """The place of the error, without its text: a kubeconfig holds secrets."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"


def _stamp(path: str | None) -> tuple[object, ...]:
    if path is None:
        return ()
    try:
        status = os.stat(path)  # noqa: PTH116 -- three fields of one call
    except OSError:
        return (path,)
    return path, status.st_mtime_ns, status.st_size, status.st_ino


def _check_service_account(connection: Connection) -> None:
    names = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    if not all(connection.environment.get(name) for name in names):
        raise SettingsError(
            "no kubeconfig is set and this is not a pod (KUBERNETES_SERVICE_HOST is unset)",
            remedy="set node.kubeconfig to the kubeconfig of this node",
        )
    for name in ("token", "ca.crt"):
        path = connection.service_account / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _unusable(path, f"cannot be read ({cap(str(error), 128)})") from error
        if not content:
            raise _unusable(path, "is empty")


def _unusable(path: Path, reason: str) -> SettingsError:
    return SettingsError(
        f"{path}: {reason}",
        remedy="give the path of a readable kubeconfig for this node; inside a pod with a service "
        "account give none",
    )
