"""Loads kubernetes_asyncio without its 900 model modules, which take 38 MB and 0.2 s.

The library's package files import everything. Empty packages replace them and resolve the few names
that the library itself uses. If this fails (another layout), the library is imported normally.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

log = structlog.get_logger(__name__)

ROOT = "kubernetes_asyncio"
NAMES: Mapping[str, Mapping[str, str]] = {
    ROOT: {},
    f"{ROOT}.client": {
        "ApiClient": "",
        "Configuration": f"{ROOT}.client.configuration",
    },
    f"{ROOT}.client.models": {},
    f"{ROOT}.config": {},
    "urllib3": {},
}
"""The replaced packages, and the module of each name that is resolved.

`ApiClient` is only named in annotations, and only Basic authentication uses urllib3, which no
Kubernetes since 1.19 accepts: neither is loaded.
"""


class Library(msgspec.Struct, frozen=True):
    """The parts of kubernetes_asyncio and aiohttp in use, untyped."""

    rest_client: Callable[..., Any]
    configuration: Callable[[], Any]
    load_kube_config: Callable[..., Any]
    load_incluster_config: Callable[..., Any]
    http_session: Callable[..., Any]
    config_errors: tuple[type[Exception], ...]
    http_errors: tuple[type[Exception], ...]
    tls_errors: tuple[type[Exception], ...]


def load() -> Library:
    """Import the libraries. The first call blocks for about 0.1 s: run it on a thread.

    Raises ImportError when kubernetes_asyncio is not installed.
    """
    if ROOT not in sys.modules:
        _stand_in()
    try:
        return _collect()
    except (ImportError, AttributeError) as error:
        if not _stood_in():
            raise
        log.warning("kube.lazy_import_failed", err=str(error))
    _step_aside()
    return _collect()


def _collect() -> Library:
    exceptions = importlib.import_module("aiohttp.client_exceptions")
    return Library(
        rest_client=_get(f"{ROOT}.client.rest", "RESTClientObject"),
        configuration=_get(f"{ROOT}.client.configuration", "Configuration"),
        load_kube_config=_get(f"{ROOT}.config.kube_config", "load_kube_config"),
        load_incluster_config=_get(f"{ROOT}.config.incluster_config", "load_incluster_config"),
        http_session=_get("aiohttp.client", "ClientSession"),
        config_errors=(_get(f"{ROOT}.config.config_exception", "ConfigException"),),
        http_errors=(exceptions.ClientError,),
        tls_errors=(exceptions.ClientSSLError,),
    )


def _get(module: str, name: str) -> Any:  # noqa: ANN401 -- the library is untyped
    return getattr(importlib.import_module(module), name)


def _stand_in() -> None:
    spec = importlib.util.find_spec(ROOT)  # finds the files, executes nothing
    if spec is None or spec.origin is None:
        raise ImportError(f"{ROOT} is not installed; install the distribution kubernetes-asyncio")
    root = Path(spec.origin).parents[1]
    for name, names in NAMES.items():
        package = _lazy_package(name, root.joinpath(*name.split(".")), names)
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)


def _stood_in() -> bool:
    spec = getattr(sys.modules.get(ROOT), "__spec__", None)
    return spec is not None and spec.loader is None


def _step_aside() -> None:
    replaced = {name.split(".")[0] for name in NAMES}
    for name in [name for name in sys.modules if name.split(".")[0] in replaced]:
        del sys.modules[name]


def _lazy_package(name: str, folder: Path, names: Mapping[str, str]) -> types.ModuleType:
    """A package in place of the one in `folder`, whose file is not executed."""
    package = types.ModuleType(name)
    origin = str(folder / "__init__.py")
    spec = importlib.machinery.ModuleSpec(name, None, origin=origin, is_package=True)
    spec.submodule_search_locations = [str(folder)]

    def resolve(wanted: str) -> object:
        if wanted not in names:
            raise AttributeError(f"{name} has no {wanted} while it is loaded lazily")
        value = _get(names[wanted], wanted) if names[wanted] else object
        setattr(package, wanted, value)
        return value

    vars(package).update(
        __path__=[str(folder)],
        __package__=name,
        __file__=origin,
        __spec__=spec,
        __getattr__=resolve,
    )
    return package
