"""`hami-agent sandbox scheduler`: serves the scheduler model to a real kube-scheduler."""

import argparse
import asyncio
import contextlib
import random
import signal
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.cli.codes import OK, PROBLEM, USAGE
from agent.cli.logs import configure
from agent.cli.main import Subparsers
from agent.core.errors import AgentError, SettingsError, host_port
from agent.host.clock import SystemClock
from agent.host.kube.connection import Connection, check
from agent.host.kube.session import KubeSession
from agent.sandbox.extender.service import Extender, ExtenderOptions, Listen, serving
from agent.sandbox.scheduler.model import SchedulerSettings

DEFAULTS: Final = SchedulerSettings()
_FASTEST: Final = 100000
GPU_POLICIES: Final = ("binpack", "spread", "mutex", "numa", "topology-aware")


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `sandbox scheduler`."""
    parser = subparsers.add_parser(
        "scheduler",
        help="serve the scheduler model as extender and webhook of a real kube-scheduler",
        description="Serves the model of HAMi's scheduler to a real kube-scheduler (POST /filter "
        "and /bind) and to a real API server (POST /webhook). It follows all nodes and pods of "
        "the cluster and writes there what HAMi's scheduler writes. Runs until SIGTERM or ctrl-c.",
        epilog="example: hami-agent sandbox scheduler --kubeconfig scheduler.conf "
        "--listen 127.0.0.1:8080",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--kubeconfig", type=Path, required=True, metavar="FILE", help="how to reach the API server"
    )
    parser.add_argument(
        "--listen",
        type=_address,
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="where to listen; port 0 is a free one (default 127.0.0.1:0)",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this chain")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="and with this key")
    parser.add_argument(
        "--scheduler-name",
        default=DEFAULTS.scheduler_name,
        metavar="NAME",
        help=f"the scheduler that pods with a GPU are given (default {DEFAULTS.scheduler_name})",
    )
    parser.add_argument(
        "--node-policy",
        choices=("binpack", "spread"),
        default=DEFAULTS.node_policy,
        help=f"which node of those that fit (default {DEFAULTS.node_policy})",
    )
    parser.add_argument(
        "--gpu-policy",
        type=_gpu_policy,
        default=DEFAULTS.gpu_policy,
        metavar="POLICY",
        help=f"which GPU: {', '.join(GPU_POLICIES)}, or several with commas "
        f"(default {DEFAULTS.gpu_policy})",
    )
    parser.add_argument(
        "--lock-timeout",
        type=_seconds,
        default=DEFAULTS.lock_timeout,
        metavar="SECONDS",
        help=f"how long a node's lock is respected (default {DEFAULTS.lock_timeout:g})",
    )
    parser.add_argument(
        "--kube-qps",
        type=_rate,
        default=DEFAULTS.kube_qps,
        metavar="N",
        help="requests per second of the scheduler's client with its Events, as HAMi limits them "
        f"(default {DEFAULTS.kube_qps:g})",
    )
    parser.add_argument(
        "--kube-burst",
        type=_count,
        default=DEFAULTS.kube_burst,
        metavar="N",
        help=f"requests in a burst that do not wait (default {DEFAULTS.kube_burst})",
    )


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Serve until SIGTERM; return the exit code: 0, 1 it cannot serve, 2 wrong usage."""
    if (args.tls_cert is None) != (args.tls_key is None):
        sys.stderr.write("hami-agent sandbox scheduler: --tls-cert and --tls-key go together\n")
        return USAGE
    connection = Connection(args.kubeconfig)
    try:
        check(connection)
        host, port = args.listen
        listen = Listen(host, port, _tls(args))
        configure("info", "auto", environ)
        asyncio.run(_serve(args, connection, listen))
    except AgentError as error:
        sys.stderr.write(f"hami-agent sandbox scheduler: {error}\n")
        return PROBLEM
    return OK


async def _serve(args: argparse.Namespace, connection: Connection, listen: Listen) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    chance = random.SystemRandom()
    session = KubeSession(connection, chance, "scheduler")
    extender = Extender(session, SystemClock(), chance, ExtenderOptions(_settings(args)))
    try:
        await session.open()
        async with contextlib.AsyncExitStack() as stack:
            address = await _start(stack, extender, listen)
            sys.stdout.write(f"listening on {address}\n")
            sys.stdout.flush()
            await over.wait()
    finally:
        await session.close()


async def _start(stack: contextlib.AsyncExitStack, extender: Extender, listen: Listen) -> str:
    """Serve until the stack ends; return the address. Raises SettingsError: it cannot be bound."""
    try:
        return await stack.enter_async_context(serving(extender, listen))
    except OSError as error:
        reason = error.strerror or str(error)
        where = f"--listen {host_port(listen.host, listen.port)}"
        raise SettingsError(f"{where}: cannot be bound ({reason})") from error


def _settings(args: argparse.Namespace) -> SchedulerSettings:
    return SchedulerSettings(
        scheduler_name=args.scheduler_name,
        node_policy=args.node_policy,
        gpu_policy=args.gpu_policy,
        lock_timeout=args.lock_timeout,
        kube_qps=args.kube_qps,
        kube_burst=args.kube_burst,
    )


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    if args.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.tls_cert, args.tls_key)
    except OSError as error:
        reason = error.strerror or str(error)
        pair = f"--tls-cert {args.tls_cert} --tls-key {args.tls_key}"
        raise SettingsError(f"{pair}: cannot be used ({reason})") from error
    return context


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if colon and host and port.isascii() and port.isdecimal() and int(port) <= 65535:
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")


def _gpu_policy(text: str) -> str:
    if all(word.strip() in GPU_POLICIES for word in text.split(",")):
        return text
    raise argparse.ArgumentTypeError(
        f"{text} is not one or several of {', '.join(GPU_POLICIES)}, with commas between them"
    )


def _seconds(text: str) -> float:
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= 86400:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a whole number of seconds (1 to 86400)")


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _FASTEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0, up to {_FASTEST}")


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= _FASTEST:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a whole number (1 to {_FASTEST})")
