"""What `doctor --pre` looks at before the agent starts on a node, and what it makes of it."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent.core.cluster.annotations import REGISTER
from agent.core.inventory.gpu import Scan
from agent.core.node.api_rights import Right
from agent.core.node.troubles import remedy as remedy_of

HAMI_LABEL: Final = ("gpu", "on")
"""The label by which HAMi's DaemonSet, and ours, choose nodes."""

MONITOR: Final = (
    "when HAMi's DaemonSet is switched off (devicePlugin.enabled=false), its vGPUmonitor goes with "
    "it: metrics and dashboards on port 31992, priorities of pods, and core limits of GPUs in the "
    "default core policy"
)

_TAKE_OFF: Final = (
    "take it off this node first: two plugins for one resource take it from each other"
)
_TAKE_OVER: Final = (
    "with takeover the agent takes the resource from it; take it off this node right after"
)

_MEND_DRIVER: Final = (
    "the driver is there and fails: look with nvidia-smi and for NVRM in the kernel's log (dmesg); "
    "then load it anew or reboot"
)


class PreflightCheck(enum.Enum):
    """What is looked at. The value is the id that the runbook explains."""

    SETTINGS = "P-SETTINGS"
    HAMI_FILES = "P-HAMI"
    PATHS = "P-PATHS"
    LIBRARY = "P-LIBRARY"
    DRIVER = "P-DRIVER"
    KUBELET = "P-KUBELET"
    WITNESS = "P-WITNESS"
    NODE = "P-NODE"
    LABEL = "P-LABEL"
    RIGHTS = "P-RIGHTS"
    PLUGIN = "P-PLUGIN"
    REPORT = "P-REPORT"
    MONITOR = "P-MONITOR"


class PreflightVerdict(enum.Enum):
    """How it is. A note is worth knowing and keeps nobody from starting."""

    OK = "ok"
    NOTE = "note"
    WRONG = "WRONG"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what to do where that is not well."""

    point: PreflightCheck
    verdict: PreflightVerdict
    subject: str
    said: str
    advice: str = ""

    @classmethod
    def ok(cls, point: PreflightCheck, subject: str, said: str) -> "Finding":
        """All is well."""
        return cls(point, PreflightVerdict.OK, subject, said)

    @classmethod
    def note(cls, point: PreflightCheck, subject: str, said: str, advice: str = "") -> "Finding":
        """The agent would start, but this should be known."""
        return cls(point, PreflightVerdict.NOTE, subject, said, advice)

    @classmethod
    def wrong(cls, point: PreflightCheck, subject: str, said: str, advice: str = "") -> "Finding":
        """The agent would not start, or would not serve."""
        return cls(point, PreflightVerdict.WRONG, subject, said, advice)


@dataclasses.dataclass(frozen=True, slots=True)
class PathFacts:
    """A path as it was found. `kind`: directory, socket, file, what it is else; empty: nothing."""

    path: str
    kind: str
    owner: int = 0
    mode: int = 0
    writable: bool = False
    """Of what is missing: it could be made."""
    ours: bool = True
    """It is root's, or belongs to the agent's own user."""
    full: bool = False
    """Of a directory: nothing new finds room there."""


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSocket:
    """A socket in the kubelet's directory that is not the kubelet's. `alive`: it answers."""

    path: str
    alive: bool

    @property
    def theirs(self) -> bool:
        """True for the names that HAMi's plugin and NVIDIA's give theirs."""
        return self.path.rpartition("/")[2].startswith("nvidia-")


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterAnswer:
    """What the API server said of this node.

    `failure`: why it said nothing more; `remedy`: what to do, where the failure knows that.
    `found` None: it was not asked for the Node, because rights are missing. `plugins` are pods of
    other device plugins for NVIDIA GPUs on this node.
    """

    server: str
    found: bool | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    denied: tuple[Right, ...] = ()
    unasked: tuple[Right, ...] = ()
    """Rights of the agent that this account is not meant to have."""
    plugins: tuple[str, ...] = ()
    failure: str = ""
    remedy: str | None = None


def judge_path(place: PathFacts, *, made: bool) -> Finding:
    """A directory that the agent writes to; `made`: the agent makes it where it is missing."""
    if not place.kind and made:
        if place.writable:
            return Finding.ok(PreflightCheck.PATHS, place.path, "is not there: the agent makes it")
        said, advice = "is not there, and cannot be made", "make it, or mount it read-write"
        return Finding.wrong(PreflightCheck.PATHS, place.path, said, advice)
    return _directory(PreflightCheck.PATHS, place)


def judge_kubelet(directory: PathFacts, socket: PathFacts) -> Finding:
    """The kubelet's device plugin directory and its socket."""
    found = _directory(PreflightCheck.KUBELET, directory)
    if found.verdict is not PreflightVerdict.OK:
        return found
    if not directory.ours:
        return Finding.wrong(
            PreflightCheck.KUBELET,
            directory.path,
            f"belongs to uid {directory.owner}",
            "give it to root, or its owner can put other sockets there",
        )
    if socket.kind != "socket":
        return Finding.wrong(
            PreflightCheck.KUBELET,
            socket.path,
            "no socket of a kubelet is there",
            "start the kubelet, or name its directory with paths.kubeletSocket",
        )
    return Finding.ok(PreflightCheck.KUBELET, socket.path, "the kubelet's socket is there")


def judge_witness(path: str, held: int | None, failure: str, *, asks: bool) -> Finding:
    """PodResources. `held`: containers with slices of ours; `asks`: it knows Get."""
    if held is None:
        return Finding.wrong(
            PreflightCheck.WITNESS,
            path,
            failure,
            "see that the kubelet runs and that paths.podResourcesSocket names its socket",
        )
    hold = "holds" if held == 1 else "hold"
    known = f"the kubelet answers, and {counted(held, 'container')} {hold} slices"
    if held:
        known += "; the agent takes them over with the ids that they have"
    if not asks:
        return Finding.note(
            PreflightCheck.WITNESS,
            path,
            f"{known}; it cannot say whom it is admitting",
            "kubelets before 1.34: pods are served one after the other (HA-2007)",
        )
    return Finding.ok(PreflightCheck.WITNESS, path, known)


def judge_driver(
    library: str, scan: Scan | None, failure: str, remedy: str | None = None
) -> Iterator[Finding]:
    """NVIDIA's library, and each GPU that will not be shared.

    `failure`: why there is no scan; `remedy`: what to do, where the failure knows that.
    """
    if scan is None:
        advice = _MEND_DRIVER if remedy is None else remedy
        yield Finding.wrong(PreflightCheck.DRIVER, library, failure, advice)
        return
    if not scan.gpus:
        said = f"driver {scan.driver_version} answers, and has no GPU that can be described"
        advice = "see below what is said of each" if scan.faults else "look with nvidia-smi -L"
        yield Finding.wrong(PreflightCheck.DRIVER, library, said, advice)
    else:
        yield _models(library, scan)
    for gpu in scan.gpus:
        if gpu.mig_enabled:
            said = f"GPU {gpu.uuid} is in MIG mode"
            yield Finding.note(PreflightCheck.DRIVER, library, said, "it will not be shared")
    for fault in scan.faults:
        advice = f"it is not shared as it is; {remedy_of(fault.trouble)}"
        yield Finding.note(PreflightCheck.DRIVER, library, fault.sentence, advice)


def counted(number: int, thing: str) -> str:
    """So many of it, in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _models(library: str, scan: Scan) -> Finding:
    models = ", ".join(sorted({gpu.name for gpu in scan.gpus}))
    said = f"driver {scan.driver_version}, {counted(len(scan.gpus), 'GPU')}: {models}"
    return Finding.ok(PreflightCheck.DRIVER, library, said)


def judge_library(home: str, missing: Sequence[str], *, needed: bool) -> Finding:
    """HAMi-core's files in `home`; `missing` names those that are not there."""
    if not missing:
        return Finding.ok(PreflightCheck.LIBRARY, home, "libvgpu.so and ld.so.preload are there")
    said = f"not there: {', '.join(missing)}"
    if not needed:
        return Finding.ok(PreflightCheck.LIBRARY, home, f"{said}; not needed with these settings")
    return Finding.wrong(
        PreflightCheck.LIBRARY,
        home,
        said,
        "put HAMi-core's files there; until then no slice is on offer (HA-5005)",
    )


def judge_cluster(node: str, cluster: ClusterAnswer) -> Iterator[Finding]:
    """The Node, its label and our rights."""
    if cluster.failure:
        advice = cluster.remedy
        if advice is None:
            advice = "mend the connection or the rights, and look again"
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
        said = "is there, " + ("registered already" if registered else "not registered yet")
        yield Finding.ok(PreflightCheck.NODE, f"Node {node}", said)
        yield _label(node, cluster.labels)
    if cluster.denied:
        yield Finding.wrong(
            PreflightCheck.RIGHTS,
            cluster.server,
            f"these are denied: {', '.join(right.words for right in cluster.denied)}",
            "grant them to this account: they stand in the chart's ClusterRole",
        )
    elif not cluster.failure:
        yield _granted(cluster)


def judge_plugins(
    directory: PathFacts,
    sockets: Sequence[PluginSocket],
    cluster: ClusterAnswer | None,
    *,
    takeover: bool,
) -> Iterator[Finding]:
    """Other plugins for these GPUs: at work, or what they left; and what goes with HAMi's.

    `takeover`: the agent is told to serve beside them.
    """
    pods = cluster.plugins if cluster is not None else ()
    at_work = [one for one in sockets if one.theirs and one.alive]
    verdict = PreflightVerdict.NOTE if takeover else PreflightVerdict.WRONG
    advice = _TAKE_OVER if takeover else _TAKE_OFF
    for pod in pods:
        said = "another device plugin runs on this node"
        yield Finding(PreflightCheck.PLUGIN, verdict, f"pod {pod}", said, advice)
    for one in at_work:
        said = "another device plugin answers here"
        yield Finding(PreflightCheck.PLUGIN, verdict, one.path, said, advice)
    for one in sockets:
        if one.theirs and not one.alive:
            yield Finding.note(
                PreflightCheck.PLUGIN,
                one.path,
                "left behind by another device plugin",
                "nobody listens there; remove it when that plugin will not come back",
            )
    if not pods and not at_work and directory.kind == "directory":
        said = "no other plugin for these GPUs answers"
        yield Finding.ok(PreflightCheck.PLUGIN, directory.path, said)
    if pods or at_work or (cluster is not None and REGISTER in cluster.annotations):
        yield Finding.note(
            PreflightCheck.MONITOR,
            "HAMi's vGPUmonitor",
            MONITOR,
            "let it run beside the agent where these are used (see deploy/README.md)",
        )


def judge_report(node: str, differences: Sequence[str]) -> Finding:
    """What the Node's register annotation says, and the agent would say otherwise."""
    subject = f"{REGISTER} of Node {node}"
    if not differences:
        return Finding.ok(PreflightCheck.REPORT, subject, "says what the agent would say")
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return Finding.note(
        PreflightCheck.REPORT,
        subject,
        differences[0] + more,
        "give the agent the settings of the plugin before it (HAMi's ConfigMaps, report.profile), "
        "unless that is meant to change",
    )


def judge_hami_files(files: Mapping[str, bool], node: str, names: Sequence[str]) -> Finding:
    """HAMi's two files by path, and whether they are there; `names`: the nodes that they name."""
    there = [path for path, found in files.items() if found]
    if not there:
        return Finding.note(
            PreflightCheck.HAMI_FILES,
            ", ".join(files) or "HAMi's ConfigMaps",
            "not there: the agent's own settings and defaults hold",
            "mount the ConfigMaps of HAMi's release where its settings shall go on",
        )
    said = "read"
    if names:
        said += f"; {node} is named" if node in names else f"; {node} is not among the nodes named"
    return Finding.ok(PreflightCheck.HAMI_FILES, ", ".join(there), said)


def _directory(point: PreflightCheck, place: PathFacts) -> Finding:
    """A directory of root's or ours that nobody else may write, and that we may."""
    said = advice = ""
    if place.kind != "directory":
        said = f"is a {place.kind}" if place.kind else "is not there"
        advice = "mount or make the directory there"
    elif place.mode & 0o002:
        said, advice = f"everybody may write there (mode {place.mode:04o})", "make it 0755 or less"
    elif not place.writable:
        said = f"cannot be written (owner {place.owner}, mode {place.mode:04o})"
        advice = "run as its owner, and mount it read-write"
    elif place.full:
        said, advice = "no space or no inodes are left", "free some space there"
    if said:
        return Finding.wrong(point, place.path, said, advice)
    return Finding.ok(point, place.path, "can be written, by its owner alone or a group")


def _granted(cluster: ClusterAnswer) -> Finding:
    if not cluster.unasked:
        said = "all that the agent asks is granted"
        return Finding.ok(PreflightCheck.RIGHTS, cluster.server, said)
    return Finding.note(
        PreflightCheck.RIGHTS,
        cluster.server,
        "this account reads what the agent reads, and is not asked for more: "
        + ", ".join(right.words for right in cluster.unasked),
        "these come with the agent's account: look again as the agent, once it is there",
    )


def _label(node: str, labels: Mapping[str, str]) -> Finding:
    key, value = HAMI_LABEL
    subject = f"label {key}={value} of Node {node}"
    if labels.get(key) == value:
        return Finding.ok(PreflightCheck.LABEL, subject, "is there")
    return Finding.note(
        PreflightCheck.LABEL,
        subject,
        "is not there",
        "HAMi's DaemonSet and the agent's choose nodes by it, unless their values say otherwise",
    )
