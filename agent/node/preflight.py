"""What a node must have, checked before the agent serves and by `doctor`."""

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from agent.allocate.edits import undefined
from agent.cluster import REGISTER
from agent.ledger import EditSettings
from agent.model import GpuUuid, Scan
from agent.node.findings import OF_ONE_GPU, Finding, PreflightCheck, PreflightVerdict, counted

# The rights that the agent needs at the API server; judges those it does not, and the clock.


class Right(msgspec.Struct, frozen=True):
    """One permission: a verb on a resource. `name`: the object; empty: any object."""

    verb: str
    resource: str
    name: str = ""
    namespace: str = ""
    selector: str = ""
    """The field selector of the request."""

    @property
    def words(self) -> str:
        """Verb and resource, as in a ClusterRole."""
        return f"{self.verb} {self.resource}"

    @property
    def reads(self) -> bool:
        """Whether the verb only reads."""
        return self.verb in {"get", "list", "watch"}


def rights(node: str, *, node_condition: bool = False) -> tuple[Right, ...]:
    """The permissions that the agent on `node` needs, except the GET of a pod (`right_to_get`).

    `node_condition`: the agent writes the Node condition GpuDegraded.
    """
    condition = (Right("patch", "nodes/status", name=node),) if node_condition else ()
    return (
        Right("get", "nodes", name=node),
        Right("watch", "nodes", name=node),
        Right("patch", "nodes", name=node),
        Right("list", "pods", selector=f"spec.nodeName={node}"),
        Right("watch", "pods", selector=f"spec.nodeName={node}"),
        Right("patch", "pods/status"),
        Right("create", "events"),
        Right("patch", "events"),
        *condition,
    )


def right_to_get(pod: tuple[str, str]) -> Right:
    """The permission to GET a pod (namespace, name) of this node.

    It needs the name, because a node's own identity may read only the pods of its node.
    """
    return Right("get", "pods", namespace=pod[0], name=pod[1])


UNNEEDED: Final = (
    Right("list", "nodes"),
    Right("delete", "nodes"),
    Right("patch", "pods"),
    Right("create", "pods/exec"),
    Right("create", "pods/binding"),
    Right("list", "secrets"),
    Right("list", "configmaps"),
    Right("impersonate", "users"),
)
"""Rights that neither the agent's ClusterRole nor a node's own identity has."""
SKEW_LIMIT: Final = 2.0
"""Seconds."""
_RESOLUTION: Final = dt.timedelta(seconds=1)
"""Of the time in an HTTP header."""


def judge_excess(server: str, granted: Sequence[Right]) -> Finding:
    """Judge the rights of `UNNEEDED` that are granted."""
    if not granted:
        said = "none of the rights that the agent does not need is granted, as far as asked"
        return Finding.ok(PreflightCheck.EXCESS, server, said)
    return Finding.note(
        PreflightCheck.EXCESS,
        server,
        f"wider than needed: {', '.join(right.words for right in granted)}",
        "give the agent the chart's ClusterRole, or the kubeconfig of this node's own identity",
    )


def skew_of(server: dt.datetime, before: dt.datetime, after: dt.datetime) -> float:
    """By how many seconds the API server's clock is certainly ahead of this node's; < 0: behind.

    `server`: the time in an answer, cut to a second; `before` and `after`: this node's clock around
    the request. 0: they may be equal.
    """
    least = (server - after).total_seconds()
    most = (server + _RESOLUTION - before).total_seconds()
    return max(least, 0.0) + min(most, 0.0)


def judge_clock(server: str, skew: float | None) -> Finding:
    """Judge the difference of the clocks; None: the answers had no time."""
    check = PreflightCheck.CLOCK
    if skew is None:
        said = "its answers have no time (Date)"
        return Finding.unknown(check, server, said, "compare `date -u` on both machines")
    if abs(skew) <= SKEW_LIMIT:
        said = f"its clock and this node's differ by at most {SKEW_LIMIT:g} s"
        return Finding.ok(check, server, said)
    order = "ahead of" if skew > 0 else "behind"
    return Finding.note(
        check,
        server,
        f"its clock is {abs(skew):.0f} s {order} this node's",
        "synchronise both clocks (timedatectl, chronyc tracking)",
    )


# Judges what a node must have for the agent, with and without an agent that runs there.

HAMI_LABEL: Final = ("gpu", "on")
"""The label by which HAMi's and the agent's DaemonSet select nodes."""

MONITOR: Final = (
    "when HAMi's DaemonSet is switched off (devicePlugin.enabled=false), its vGPUmonitor goes with "
    "it, and the Service on port 31992"
)

_TAKE_OFF: Final = (
    "remove it from this node first: two plugins for one resource take it from each other"
)
_TAKE_OVER: Final = (
    "with takeover the agent takes the resource from it; remove it from this node right after"
)

_REPAIR_DRIVER: Final = (
    "the driver is there but fails: look with nvidia-smi and for NVRM in the kernel's log "
    "(dmesg); then reload the driver or reboot"
)


class PathFacts(msgspec.Struct, frozen=True):
    """The state of a path. `kind`: directory, socket, file or another; empty: does not exist."""

    path: str
    kind: str
    owner: int = 0
    mode: int = 0
    writable: bool = False
    """If the path does not exist: the agent could create it."""
    ours: bool = True
    """Its owner is root or the agent's user."""
    full: bool = False
    """The file system of the directory has no space or no inodes left."""


class PluginSocket(msgspec.Struct, frozen=True):
    """A socket of a plugin in the kubelet's directory. `alive`: a process listens on it."""

    path: str
    alive: bool

    @property
    def theirs(self) -> bool:
        """True if the socket has a name of HAMi's or NVIDIA's plugin."""
        return self.path.rpartition("/")[2].startswith("nvidia-")


class ClusterAnswer(msgspec.Struct, frozen=True):
    """The API server's answers about this node.

    - `found`: whether the Node exists; None: not asked, because permissions are missing.
    - `plugins`: pods of other device plugins for NVIDIA GPUs on this node.
    - `failure`: why there are no further answers. `remedy`: what to do about it, if known.
    """

    server: str
    found: bool | None = None
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    denied: tuple[Right, ...] = ()
    unasked: tuple[Right, ...] = ()
    """Permissions that the agent's account has and this account need not have."""
    plugins: tuple[str, ...] = ()
    failure: str = ""
    remedy: str | None = None


def judge_path(
    place: PathFacts, point: PreflightCheck = PreflightCheck.PATHS, *, made: bool
) -> Finding:
    """Judge a directory that the agent writes to. `made`: the agent creates it if missing."""
    if not place.kind and made and place.writable:
        return Finding.ok(point, place.path, "does not exist: the agent creates it")
    said = means = ""
    advice = f"chown root and chmod 0755 {place.path}"
    if not place.kind and made:
        said, advice = "does not exist and cannot be created", "create it, or mount it read-write"
    elif place.kind != "directory":
        said = f"is a {place.kind}" if place.kind else "does not exist"
        advice = "mount or create the directory there"
    elif not place.ours or place.mode & 0o002:
        said = f"belongs to uid {place.owner}"
        if place.ours:
            said = f"every user may write there (mode {place.mode:04o})"
        means = "who may write there can replace the sockets, or the limits of containers"
    elif not place.writable:
        said = f"cannot be written (owner {place.owner}, mode {place.mode:04o})"
        advice = "run as its owner, and mount it read-write"
    elif place.full:
        said, advice = "no space or no inodes are left", "free some space there"
    else:
        return Finding.ok(point, place.path, "can be written, only by its owner or a group")
    return Finding.wrong(point, place.path, said, advice, means)


def judge_size(path: str, size: int, entries: int) -> Finding:
    """Note a container directory that has more bytes or entries than HAMi-core can need."""
    return Finding.note(
        PreflightCheck.PATHS,
        path,
        f"keeps {size / 2**20:,.0f} MiB or more in {counted(entries, 'file')}, or has one that may "
        "not be read; HAMi-core needs about 2 MiB",
        "ask the pod's owner why (the name begins with the pod's UID), or delete the pod",
        "when that file system is full, new pods with GPUs are refused (HA-5003)",
    )


def judge_bytecode(program: str, uncompiled: int) -> Finding:
    """Judge how many of the modules that the program in `program` has loaded are not compiled."""
    if not uncompiled:
        return Finding.ok(PreflightCheck.BYTECODE, program, "its modules are compiled")
    return Finding.note(
        PreflightCheck.BYTECODE,
        program,
        f"each start compiles {counted(uncompiled, 'module')} anew, and cannot keep the result",
        "run `python -m compileall` as the files' owner, for Python's own library too",
    )


def judge_kubelet(directory: PathFacts, socket: PathFacts) -> Finding:
    """Judge the kubelet's device plugin directory and its socket."""
    finding = judge_path(directory, PreflightCheck.KUBELET, made=False)
    if finding.verdict is not PreflightVerdict.OK:
        return finding
    if socket.kind != "socket":
        return Finding.wrong(
            PreflightCheck.KUBELET,
            socket.path,
            "no socket of a kubelet is there",
            "start the kubelet, or set paths.kubeletSocket to its socket",
        )
    return Finding.ok(PreflightCheck.KUBELET, socket.path, "the kubelet's socket is there")


def judge_witness(
    path: str, held: int | None, failure: str, *, asks: bool, serving: bool = False
) -> Finding:
    """Judge PodResources. `held`: number of containers with slices; `asks`: it has Get.

    `serving`: an agent runs and knows these containers.
    """
    if held is None:
        return Finding.wrong(
            PreflightCheck.WITNESS,
            path,
            failure,
            "check that the kubelet runs and that paths.podResourcesSocket names its socket",
        ).because_of(PreflightCheck.KUBELET)
    hold = "holds" if held == 1 else "hold"
    known = f"the kubelet answers, and {counted(held, 'container')} {hold} slices"
    if held and not serving:
        known += "; the agent takes them over with the ids that they have"
    if not asks:
        return Finding.note(
            PreflightCheck.WITNESS,
            path,
            f"{known}; it cannot say which pod it is admitting",
            "this kubelet is older than 1.34: start GPU pods one at a time (HA-2007)",
        )
    return Finding.ok(PreflightCheck.WITNESS, path, known)


def judge_driver(
    library: str, scan: Scan | None, failure: str, remedy: str | None = None
) -> Iterator[Finding]:
    """Judge NVIDIA's library, and name each GPU that will not be shared.

    `failure`: why there is no scan. `remedy`: what to do about it, if known.
    """
    if scan is None:
        advice = _REPAIR_DRIVER if remedy is None else remedy
        yield Finding.wrong(PreflightCheck.DRIVER, library, failure, advice)
        return
    if not scan.gpus:
        said = f"driver {scan.driver_version} answers but describes no GPU"
        advice = "see the notes on each GPU below" if scan.faults else "look with nvidia-smi -L"
        yield Finding.wrong(PreflightCheck.DRIVER, library, said, advice)
    else:
        models = ", ".join(sorted({gpu.name for gpu in scan.gpus}))
        said = f"driver {scan.driver_version}, {counted(len(scan.gpus), 'GPU')}: {models}"
        yield Finding.ok(PreflightCheck.DRIVER, library, said)
    for gpu in scan.gpus:
        if gpu.mig_enabled:
            said = f"GPU {gpu.uuid} is in MIG mode"
            yield Finding.note(
                PreflightCheck.DRIVER, library, said, "it will not be shared", OF_ONE_GPU
            )
    for fault in scan.faults:
        advice = f"it is not shared; {fault.remedy}"
        yield Finding.note(PreflightCheck.DRIVER, library, fault.sentence, advice, OF_ONE_GPU)


def judge_library(home: str, missing: Sequence[str], *, needed: bool) -> Finding:
    """Judge HAMi-core's files in `home`. `missing`: the names of those that do not exist."""
    if not missing:
        return Finding.ok(PreflightCheck.LIBRARY, home, "libvgpu.so and ld.so.preload are there")
    said = f"not there: {', '.join(missing)}"
    if not needed:
        return Finding.ok(PreflightCheck.LIBRARY, home, f"{said}; not needed with these settings")
    advice = "put HAMi-core's files there; until then no slice is on offer (HA-5005)"
    return Finding.wrong(PreflightCheck.LIBRARY, home, said, advice)


def judge_cdi(
    gpus: Sequence[GpuUuid], settings: EditSettings, defined: frozenset[str] | None
) -> Finding:
    """Judge whether a container runtime finds the GPUs by the CDI names of the answers.

    `defined`: the names that the specifications define; None: not known.
    """
    directories, fault = ", ".join(settings.cdi_spec_dirs), undefined(gpus, settings, defined)
    if defined is None:
        said = "cannot be read, or is not mounted here, so GPUs are on offer whatever it defines"
        advice = "mount the host's directories read-only at the same paths, or run this as root"
        return Finding.unknown(PreflightCheck.CDI, directories, said, advice)
    if fault is not None:
        return Finding.wrong(PreflightCheck.CDI, directories, *fault)
    return Finding.ok(PreflightCheck.CDI, directories, f"defines {counted(len(gpus), 'GPU')}")


def judge_cluster(node: str, cluster: ClusterAnswer) -> Iterator[Finding]:
    """Judge the Node, its label and the permissions."""
    if cluster.failure:
        advice = cluster.remedy
        if advice is None:
            advice = "repair the connection or the permissions, and run this check again"
        yield Finding.wrong(PreflightCheck.NODE, cluster.server, cluster.failure, advice)
    elif cluster.found is False:
        yield Finding.wrong(
            PreflightCheck.NODE,
            f"Node {node}",
            "the API server knows no such Node",
            "set node.name (--node-name, NODE_NAME) to the Node's name in Kubernetes",
        )
    elif cluster.found:
        registered = REGISTER in cluster.annotations
        said = "exists, " + ("already registered" if registered else "not registered yet")
        yield Finding.ok(PreflightCheck.NODE, f"Node {node}", said)
        key, value = HAMI_LABEL
        subject = f"label {key}={value} of Node {node}"
        if cluster.labels.get(key) == value:
            yield Finding.ok(PreflightCheck.LABEL, subject, "is set")
        else:
            advice = "by default, HAMi's DaemonSet and the agent's select nodes by it"
            yield Finding.note(PreflightCheck.LABEL, subject, "is not set", advice)
    if cluster.denied:
        yield Finding.wrong(
            PreflightCheck.RIGHTS,
            cluster.server,
            f"these are denied: {', '.join(right.words for right in cluster.denied)}",
            "grant them to this account: the chart's ClusterRole lists them",
        )
    elif not cluster.failure and cluster.unasked:
        unasked = ", ".join(right.words for right in cluster.unasked)
        yield Finding.note(
            PreflightCheck.RIGHTS,
            cluster.server,
            f"this account can read what the agent reads; these were not checked: {unasked}",
            "the agent's account has them: run this check again as the agent once it is installed",
        )
    elif not cluster.failure:
        said = "all permissions of the agent are granted"
        yield Finding.ok(PreflightCheck.RIGHTS, cluster.server, said)


def judge_plugins(
    directory: PathFacts,
    sockets: Sequence[PluginSocket],
    cluster: ClusterAnswer | None,
    *,
    takeover: bool,
) -> Iterator[Finding]:
    """Judge other plugins for these GPUs: running ones, sockets they left, HAMi's vGPUmonitor.

    `takeover`: the agent is set to serve beside them.
    """
    pods = cluster.plugins if cluster is not None else ()
    running = [socket for socket in sockets if socket.theirs and socket.alive]
    verdict = PreflightVerdict.NOTE if takeover else PreflightVerdict.WRONG
    advice = _TAKE_OVER if takeover else _TAKE_OFF
    for pod in pods:
        said = "another device plugin runs on this node"
        yield Finding(PreflightCheck.PLUGIN, verdict, f"pod {pod}", said, advice)
    for socket in filter(lambda socket: socket.theirs, sockets):
        if socket.alive:
            said = "another device plugin answers here"
            yield Finding(PreflightCheck.PLUGIN, verdict, socket.path, said, advice)
        else:
            said = "left behind by another device plugin"
            rest = "no process listens there; remove it if that plugin will not come back"
            yield Finding.note(PreflightCheck.PLUGIN, socket.path, said, rest)
    if not pods and not running and directory.kind == "directory":
        said = "no other plugin for these GPUs answers"
        yield Finding.ok(PreflightCheck.PLUGIN, directory.path, said)
    if pods or running or (cluster is not None and REGISTER in cluster.annotations):
        yield Finding.note(
            PreflightCheck.MONITOR,
            "HAMi's vGPUmonitor",
            MONITOR,
            "the agent serves the same metrics; let Prometheus ask its port, or open 31992 again "
            "(see deploy/README.md)",
        )


def judge_report(node: str, differences: Sequence[str]) -> Finding:
    """Judge the differences between the Node's register annotation and the agent's."""
    subject = f"{REGISTER} of Node {node}"
    if not differences:
        return Finding.ok(PreflightCheck.REPORT, subject, "says what the agent would write")
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return Finding.note(
        PreflightCheck.REPORT,
        subject,
        differences[0] + more,
        "unless you want this change, give the agent the settings of the plugin before it (HAMi's "
        "ConfigMaps, report.profile)",
    )


def judge_hami_files(
    files: Mapping[str, bool],
    node: str,
    names: Sequence[str],
    *,
    needed: bool = True,
    unchecked: bool = False,
) -> Finding:
    """Judge HAMi's two files: whether each path exists, and the nodes (`names`) that they name.

    `needed`: without them the node may share otherwise than before, which a running agent has done.
    `unchecked`: they do not say how HAMi's scheduler reads requests, and pods need it.
    """
    there = [path for path, exists in files.items() if exists]
    subject = ", ".join(there or files) or "HAMi's ConfigMaps"
    said = "read" if there else "not there: the agent's own settings and defaults apply"
    if names and there:
        said += f"; {node} is named" if node in names else f"; {node} is not among the nodes named"
    advice = "" if there or not needed else "to keep the settings of HAMi's release"
    if unchecked:
        said += "; annotations are not checked against what their pods request"
        advice = advice or "to check them as HAMi after 2.10 does"
    if not advice:
        return Finding.ok(PreflightCheck.HAMI_FILES, subject, said)
    return Finding.note(PreflightCheck.HAMI_FILES, subject, said, f"{advice}, mount its ConfigMaps")
