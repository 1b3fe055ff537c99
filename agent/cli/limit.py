"""`hami-agent limit`: gives a running container other limits, or undoes that."""

import argparse
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from agent.cli.api_socket import add_socket
from agent.cli.arguments import add_output
from agent.cli.codes import USAGE, fail
from agent.cli.gpu_action import request
from agent.cli.main import Subparsers
from agent.codec.quantity import decode_mib

DEADLINE: Final = 30.0
"""Seconds: the agent waits for the state's disk, and twice for HAMi-core's regions."""

_POD: Final = re.compile(r"(?:[^/:]{1,63}/)?[^/:]{1,253}")


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `limit`."""
    parser = subparsers.add_parser(
        "limit",
        help="give a running container other limits",
        description="Makes the running agent raise or lower the limits of a running container "
        "through HAMi-core, within what its GPU has free. The container is not restarted. The "
        "limits last until the pod ends, across restarts of container and agent; --reset undoes "
        "them. The agent writes them into the pod's annotation too, and says when HAMi's "
        "scheduler counts them. Exits 0 also if there is nothing to change, 1 if it is refused, 3 "
        "if no agent answers, and 4 if there is no such pod, container or GPU.",
        epilog="example: hami-agent limit team-a/train-0 --memory 12Gi --cores 50",
    )
    parser.add_argument("pod", metavar="[NAMESPACE/]POD", type=_pod, help="the pod, on this node")
    parser.add_argument("--container", metavar="NAME", help="its container, if several have GPUs")
    parser.add_argument("--gpu", metavar="GPU", help="index or UUID (default: each it has)")
    parser.add_argument(
        "--memory", metavar="SIZE", type=_memory, help="limit on each GPU's memory: 12Gi, 3000Mi"
    )
    parser.add_argument(
        "--cores", metavar="PERCENT", type=_cores, help="limit on each GPU's compute; 0: none"
    )
    parser.add_argument("--reset", action="store_true", help="limits as the pod was given them")
    add_socket(parser)
    add_output(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code: 0, 1, 2, 3 no agent, 4 nothing of that name."""
    del environ
    has_limit = args.memory is not None or args.cores is not None
    if args.reset is has_limit:
        return fail("limit", "give --memory, --cores or both; or --reset alone", USAGE)
    wanted = {
        "container": args.container,
        "gpu": args.gpu,
        "memoryMib": args.memory,
        "cores": args.cores,
        "reset": "true" if args.reset else None,
    }
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    return request(args, f"/api/v1/pods/{quote(args.pod)}:limit?{query}", DEADLINE, _rendered)


def _pod(text: str) -> str:
    if _POD.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not [NAMESPACE/]POD")
    return text


def _memory(text: str) -> int:
    mib = decode_mib(text)
    if mib is None or mib < 1:
        raise argparse.ArgumentTypeError(
            f"{text[:64]!r} is not an amount of at least 1Mi with its unit, such as 12Gi or 3000Mi"
        )
    return mib


def _cores(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,3}", text) is None or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not a percentage from 0 to 100")
    return int(text)


def _rendered(data: Mapping[str, Any]) -> tuple[str, bool]:
    who = f"container {data['container']} of pod {data['namespace']}/{data['pod']}"
    lines = [f"{who}: {_change(gpu)}" for gpu in data["gpus"]]
    if not data["changed"]:
        lines.append("nothing was changed")
    lines += data["notes"]
    return "".join(f"{line}\n" for line in lines), True


def _change(gpu: Mapping[str, Any]) -> str:
    memory = _was(f"{gpu['memoryMib']} MiB", f"{gpu['wasMemoryMib']} MiB")
    cores = _was(_percent(gpu["cores"]), _percent(gpu["wasCores"]))
    return f"GPU {gpu['gpu']}: memory {memory}, cores {cores}"


def _was(now: str, before: str) -> str:
    return now if now == before else f"{now} (was {before})"


def _percent(cores: int) -> str:
    return f"{cores} %" if cores else "no limit"
