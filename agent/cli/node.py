"""The verbs that act on a node.

`recheck` and `release` ask the running agent by its socket. The others write the Node.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from agent.cli.config import add_settings, flags, looked, sources, started
from agent.cli.connections import (
    IN_CLUSTER,
    add_cluster,
    add_socket,
    call,
    connection_of,
    open_session,
)
from agent.cli.main import TABLE, Exit, NotThere, Subparsers, add_output, code_of, fail, typed
from agent.cli.output import answer
from agent.cluster import CORDON, HANDSHAKE, REGISTER, NodeView
from agent.errors import AgentError, ApiConflict, ApiError, ApiNotFound, SettingsError, StateError
from agent.hami.annotations import read_register
from agent.hami.region import RegionChange
from agent.host.system import LockFile, Worker, host_name
from agent.kit.logs import configure
from agent.kit.units import some
from agent.kube.client import Connection
from agent.kube.objects import KubeApi
from agent.kube.reader import KubeLeftovers
from agent.model import GpuUuid, gpu_title
from agent.node import read_cordon
from agent.setting import text_where
from agent.settings.reading import Sources
from agent.usage import HostRegions

NAME: Final = re.compile(r"[^/:]{1,64}")
"""A name of a GPU that the agent's HTTP server accepts."""
DEADLINES: Final = {"recheck": 10.0, "was-reset": 10.0, "release": 15.0}
"""Seconds for each action of the agent."""

EFFECTS: Final = {
    "cordon": "HAMi's scheduler (2.10 and later) places no new pods on it; pods that run there "
    "go on.",
    "uncordon": "HAMi's scheduler may place new pods on it again.",
}
"""What a cordon, or the end of one, does."""

_NEEDS: Final = (
    " It needs the rights to get and patch nodes; the agent's own account may not write this "
    "annotation. Exits 0 also if there is nothing to change, 1 if it was refused or the Node "
    "changed at each of five tries, 3 if the API server does not answer, 4 if there is no such GPU."
)

DESCRIPTIONS: Final = {
    "recheck": "Makes the running agent probe a GPU now, or all. It prints the health of each, "
    "why, and what is needed until it is ok. A released GPU is taken back. The agent resets "
    "nothing and does not shorten the cool-down. With --was-reset you state that you reset the GPU "
    "since its last error, which drivers before 570 do not report. The exit code is 0 if each GPU "
    "is served, 1 if one is not, 3 if no agent answers, and 4 if there is no such GPU.",
    "release": "Makes the running agent release a GPU, or all. Until `hami-agent recheck` takes it "
    "back, no new pod gets it and the agent neither opens nor asks it. Pods that have it go on, "
    "and are named: a reset takes the GPU from them. The exit code is 0 if the GPU is free, 1 if "
    "the agent still holds it or pods have it, 3 if no agent answers, and 4 if there is no such "
    "GPU.",
    "cordon": "Writes the GPU into the Node's annotation hami.io/device-cordon. HAMi's scheduler "
    "(2.10 and later) then places no new pods on it. Pods that run there go on, and the agent and "
    "the kubelet offer its slices as before. For work on a GPU: cordon it, delete the pods that "
    f"hold it, `release` it, do the work, `recheck` it, and uncordon it.{_NEEDS}",
    "uncordon": "Removes the GPU from the Node's annotation hami.io/device-cordon. HAMi's "
    f"scheduler may then place new pods on it again.{_NEEDS}",
}
"""What the help of each verb says."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `recheck`, `release`, `cordon`, `uncordon` and `uninstall`."""
    for verb, text in DESCRIPTIONS.items():
        of_node = verb in EFFECTS
        names = "an index or a UUID" if of_node else "an index, a UUID or `all`"
        place = " --node gpu-1" if of_node else ""
        parser = subparsers.add_parser(
            verb, description=text, epilog=f"example: hami-agent {verb} 3{place}"
        )
        name = text_where(lambda text: bool(NAME.fullmatch(text)) and text.isprintable(), names)
        parser.add_argument("gpu", metavar="GPU", type=typed(name, names), help=names)
        if of_node:
            told = "the Node (default: that of the agent's settings)"
            parser.add_argument("--node", metavar="NAME", help=told)
            add_cluster(parser)
        else:
            add_socket(parser)

        if verb == "recheck":
            told = "the GPU (with `all`: each GPU) was reset since its last error: begin its "
            parser.add_argument("--was-reset", action="store_true", help=f"{told}cool-down")

        add_output(parser)

    parser = subparsers.add_parser(
        "uninstall",
        description="Removes the GPU report and the agent's condition from the Node of this host. "
        "It refuses while pods with GPUs or an agent run here. It releases containers that a "
        "killed agent held back, and changes no pod; a second call does nothing. Exits 1 if it "
        "refused or something of an agent is left, 3 without the API server, 4 without the Node.",
        epilog="example: hami-agent uninstall --node-name gpu-1 -o json",
    )
    told = "even if pods with GPUs run here; not beside an agent"
    parser.add_argument("--force", action="store_true", help=told)
    add_output(parser)

    everywhere = parser.add_argument_group(
        "all Nodes",
        "also where pods with GPUs run, but not where a device plugin serves. Only the settings "
        "--kubeconfig and --resource-name are used",
    ).add_argument
    told = "clean all Nodes; it waits up to 90 s for agents that still serve"
    everywhere("--all-nodes", action="store_true", help=told)
    everywhere("--namespace", metavar="NAME", help="namespace of the agents' pods")
    everywhere("--selector", metavar="LABELS", help="labels of the agents' pods, as k=v,k=v")
    add_settings(parser, only=OF_USE)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run one of the verbs; return the exit code, which the verb's help explains."""
    configure("error", "auto", environ)
    if args.verb in EFFECTS:
        return asyncio.run(_change(args, environ))

    if args.verb == "uninstall":
        return _uninstall(args, environ)

    action = "was-reset" if vars(args).get("was_reset") else args.verb
    target = f"/api/v1/gpus/{quote(args.gpu, safe='')}:{action}"
    status, text = call(args.socket, "POST", target, DEADLINES[action])
    if status != 200:
        return fail(args.verb, text.strip(), Exit.NOT_FOUND if status == 404 else Exit.PROBLEM)

    try:
        said = json.loads(text)
        lines, is_good = (_release_text if args.verb == "release" else _recheck_text)(said["data"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return fail(args.verb, f"{args.socket} did not answer as an agent", Exit.UNREACHABLE)

    answer(args.output, said["kind"], said["data"], lines, source=str(args.socket))
    return Exit.OK if is_good else Exit.PROBLEM


ANSWERS: Final = {
    "passed": "it answered",
    "failed": "it answered with an error",
    "lost": "the driver has lost it",
    "refused": "the driver refuses calls about it",
    "silent": "it did not answer",
}
"""What a probe found, by its outcome."""


def _recheck_text(data: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What a recheck found, as lines; and whether each GPU is served."""
    gpus: list[Mapping[str, Any]] = data.get("gpus", [data])  # all, or one
    lines: list[str] = []
    for gpu in gpus:
        outcome, text = gpu["probe"]["outcome"], gpu["probe"]["text"]
        answered = f"{ANSWERS.get(outcome, outcome)}{text and f' ({text})'}"
        served = "served" if gpu["serving"] else "not served"
        lines += [
            *([""] if lines else []),
            f"{gpu_title(gpu['uuid'], gpu['gpu'])}: {answered}",
            f"{gpu['condition']} since {gpu['since']}, {served}",
            *filter(None, [gpu["text"]]),
            *(f"needed: {step}" for step in gpu["missing"]),
        ]

    is_good = bool(gpus) and all(gpu["serving"] is True for gpu in gpus)
    return lines or ["this node has no GPU"], is_good


def _release_text(data: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What a release did, as lines; and whether the GPUs are free for work on them."""
    names, holders = data.get("labels") or data["gpus"], data["heldBy"]
    gpus, what, them = f"GPUs {', '.join(names)}", "all", "them"
    if len(names) == 1:
        index = int(names[0]) if names[0].isdigit() else None
        gpus, what, them = gpu_title(data["gpus"][0], index), names[0], "it"
    if not holders and data["released"] is True:
        return [f"{gpus}: released until `hami-agent recheck {what}`"], True

    lines = [f"still held by pod {pod}: delete it first" for pod in holders]
    if why := data["obstacle"]:
        lines.append(f"still open in the agent, which can be stopped for the work: {why}")
    return [*lines, f"{gpus}: not free yet, but no new pod gets {them}; release again later"], False


# Cordons.


async def _change(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Cordon or uncordon the GPU, print what became of it and return the exit code.

    A scheduler takes in a cordon only when it reads the Node's report anew. Removing the handshake
    makes releases from 2.9 on do so within 15 s (HAMi v2.10 pkg/device/devices.go, CheckHealth).
    Raises NotThere, ApiError, SettingsError.
    """
    connection = connection_of(args.kubeconfig, args.context, environ)
    if args.node is None:  # the settings are read only for what nothing else says
        read = await looked(Sources(None, environ, {}, host_name()))
        args.node = read.taken().settings().node

    # Another field manager: what an operator writes does not count as an agent's.
    async with open_session(connection, "hami-agent-cordon") as session:
        uuid, index, is_changed = await _write(KubeApi(session, args.node), args)

    on = args.verb == "cordon"
    said = f"was {'cordoned already' if on else 'not cordoned'}; nothing was changed"
    if is_changed:
        state = "cordoned" if on else "no longer cordoned"
        said = f"is {state}. {EFFECTS[args.verb]} This takes up to 15 s."

    data = {"node": args.node, "gpu": index, "uuid": uuid, "cordoned": on}
    data["changed"], source = is_changed, f"API server by {connection.source}"
    told = [f"{gpu_title(uuid, index)} of Node {args.node} {said}"]
    answer(args.output, "Cordon", data, told, source=source)
    return Exit.OK


async def _write(
    api: KubeApi, args: argparse.Namespace, tries: int = 5
) -> tuple[GpuUuid, int | None, bool]:
    """UUID and index of the GPU, and whether the Node was written. Raises NotThere, ApiError."""
    on = args.verb == "cordon"
    seen = await api.get_node()
    if seen is None:
        raise NotThere(f"the API server knows no Node {args.node}: name it with --node")

    (gpu, index), listed = _named(seen, args.gpu), read_cordon(seen.annotations.get(CORDON))
    if (gpu in listed) is on:
        return gpu, index, False

    kept = [*listed, gpu] if on else [uuid for uuid in listed if uuid != gpu]
    changes: dict[str, str | None] = {CORDON: ",".join(kept) or None}
    changes |= {HANDSHAKE: None} if HANDSHAKE in seen.annotations else {}
    try:
        # Refused if the Node changed since it was read, so that what others wrote is kept. Kubelets
        # and schedulers write it often: it is read again.
        await api.annotate_node(changes, seen.resource_version)
    except ApiConflict:
        if tries == 1:
            raise
        return await _write(api, args, tries - 1)
    return gpu, index, True


def _named(node: NodeView, name: str) -> tuple[GpuUuid, int | None]:
    """The GPU of that index or UUID, reported or only in the cordon. Raises NotThere."""
    gpus: dict[GpuUuid, int | None]
    gpus = {gpu.uuid: gpu.index for gpu in read_register(node.annotations.get(REGISTER))}
    gpus |= dict.fromkeys(read_cordon(node.annotations.get(CORDON))) | gpus
    for uuid, index in gpus.items():
        if name.lower() == uuid.lower() or (index is not None and name == str(index)):
            return uuid, index

    known = ", ".join(gpu_title(uuid, index) for uuid, index in gpus.items())
    remedy = f"it has {known}" if known else f"it has no readable {REGISTER}"
    raise NotThere(f"Node {node.name} has no GPU {name}", remedy=remedy)


# Uninstall: what an agent wrote on the Nodes.

UNINSTALLER: Final = "hami-agent-uninstall"
"""The field manager of what is removed."""
WAIT: Final = 90.0
"""Seconds for the agents to end (their pods' grace period is 15 s), and for the kubelets to report
that no plugin serves, which they do every 10 s."""
PAUSE: Final = 5.0
"""Seconds between two looks at the Nodes."""
OF_USE: Final = (
    *("node.name", "node.kubeconfig", "sharing.resourceName"),
    *("paths.state", "paths.run", "library.hookPath"),
)
"""The settings that uninstall uses."""


class Cleaned(msgspec.Struct, frozen=True):
    """The result for one Node: what was removed, or why it was left, or why something stays."""

    node: str
    removed: tuple[str, ...] = ()
    skipped: str = ""
    failure: str = ""


async def uninstall_here(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> AsyncIterator[Cleaned]:
    """Clean the Node of this host, if no pod there has a GPU; or by --force.

    The agent's lock keeps an agent from starting meanwhile. Raises AgentError: it is refused, there
    is no such Node, or the API server does not answer.
    """
    try:
        settings = (await started(sources(args, environ))).taken().settings()
    except SettingsError as error:
        raise AgentError(str(error)) from error  # not the exit code of a kubeconfig

    lock = LockFile(settings.paths.run / "lock")
    with contextlib.ExitStack() as held:
        held.callback(lock.release)
        if not lock.try_take():
            raise AgentError(
                f"an agent runs on this host ({lock.holder()}) and would write again: stop it "
                "first (`systemctl stop hami-agent`, or take the DaemonSet off this node)"
            )

        await _release(settings.hook_path)
        if settings.plain is not None:  # plain mode writes nothing to a Node
            return

        connection = Connection(settings.kubeconfig, environment=environ)
        async with open_session(connection, UNINSTALLER) as session:
            api = KubeLeftovers(session, settings.sharing.resource)
            node = await api.node(settings.node)
            if node.is_touched and not args.force and (pods := await api.gpu_pods(node.name)):
                raise AgentError(
                    f"pods with GPUs run here ({some(pods)}): they would keep running, but "
                    "could not restart until another plugin serves; --force uninstalls anyway"
                )

            await api.clean(node)
            yield Cleaned(node.name, node.names)


async def uninstall_everywhere(
    connection: Connection, resource: str, namespace: str, selector: str
) -> AsyncIterator[Cleaned]:
    """Clean every Node on which no agent and no plugin is left, also where pods have GPUs.

    It looks until all are free or WAIT has passed. A plugin is there if the kubelet offers its
    resource. One that is just restarting is not seen: it writes its report again.

    Raises SettingsError, ApiError: the pods or the Nodes cannot be read.
    """
    async with open_session(connection, UNINSTALLER) as session:
        api, clock = KubeLeftovers(session, resource), asyncio.get_running_loop().time
        nodes, ends = await api.nodes(namespace, selector), clock() + WAIT
        if busy := [node.name for node in nodes if node.is_busy]:
            _say(f"waiting up to {WAIT:.0f} s for agents and plugins to end: {some(busy)}")

        while any(node.is_busy for node in nodes) and clock() < ends:
            await asyncio.sleep(PAUSE)
            nodes = await api.nodes(namespace, selector)

        for node in nodes:
            failure = skipped = ""
            if node.agent and node.has_kubelet:  # without a kubelet nothing runs the pod
                failure = f"its agent has not ended and would write again (pod {node.agent}): "
                failure += "clean it when the pod is gone (GUIDE.md, Uninstall)"
            elif node.is_touched and node.served:
                skipped = f"a device plugin serves {resource} there"
            elif node.is_touched:
                try:
                    await api.clean(node)
                except ApiNotFound:  # it was deleted meanwhile
                    continue
                except ApiError as error:
                    if not error.status:  # each of the others would wait for the API server
                        raise
                    failure = str(error)
            else:
                continue

            yield Cleaned(node.name, () if failure or skipped else node.names, skipped, failure)


async def _release(hook: Path) -> None:
    """Release the containers that an agent held back which was killed: no other will."""
    try:
        async with Worker("regions") as worker:
            regions = HostRegions(hook, worker)
            held = await regions.held()
            failed = await regions.write({name: RegionChange(recent_kernel=0) for name in held})
    except StateError as error:
        _say(f"containers that an agent held back may wait for ever: {error}")
        return

    for name in held:
        _say(f"{name}: launches were held back; {failed.get(name, 'released')}")


def _say(text: str) -> None:
    sys.stderr.write(f"hami-agent uninstall: {text}\n")


def _uninstall(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run `uninstall`, print a line for each change, and return the exit code."""
    given = flags(args)
    if {args.all_nodes} != {bool(args.namespace), bool(args.selector)}:
        return fail("uninstall", "--all-nodes, --namespace and --selector go together", Exit.USAGE)

    done: list[Cleaned] = []

    async def work() -> None:
        found = uninstall_here(args, environ)
        if args.all_nodes:
            # No settings are read: a release with invalid settings must be uninstallable. Its Job
            # has the variables of the release, so in a pod its own account comes before KUBECONFIG.
            named = Path(given["--kubeconfig"]) if given.get("--kubeconfig") else None
            resource = given.get("--resource-name") or "nvidia.com/gpu"  # the default
            connection = Connection(None, environment=environ)
            if named or IN_CLUSTER not in environ:
                connection = connection_of(named, "", environ)
            found = uninstall_everywhere(connection, resource, args.namespace, args.selector)

        async for node in found:
            done.append(node)
            said = f"removed {', '.join(node.removed)}"
            said = f"skipped: {node.skipped}" if node.skipped else said
            said = f"something is left: {node.failure}" if node.failure else said
            if args.output == TABLE and node != Cleaned(node.node):
                print(f"{node.node}: {said}", flush=True)

    refusal = ""
    try:
        asyncio.run(work())
        code = Exit.PROBLEM if any(node.failure for node in done) else Exit.OK
    except AgentError as error:
        refusal, code = str(error), code_of(error)

    is_clean = not refusal and all(node == Cleaned(node.node) for node in done)
    data = {"ok": code == Exit.OK, "refusal": refusal, "nodes": done}
    nothing = "nothing of the agent's was found"
    answer(args.output, "Uninstallation", data, [nothing] if is_clean else [])
    return fail("uninstall", refusal, code) if refusal else code
