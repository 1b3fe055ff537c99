"""The kubelet's own checkpoint, changed behind its back: it believes what it reads at its start."""

import random
from collections.abc import Mapping

from agent.sandbox.kubelet import checkpoint
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.pods import as_seen


def rebook(cluster: Cluster, name: str, ids: Mapping[str, str]) -> None:
    """Have a pod's containers hold other slices, by the old ones. The kubelet must not run.

    Raises:
        OSError, CheckpointError: the file cannot be read, or is none of the real kubelet's.
        KeyError: the pod holds other ids than those.
    """
    uid, directory = as_seen(cluster, name)["metadata"]["uid"], cluster.kubelet.plugins
    content = checkpoint.load(directory)
    entries = tuple(
        _rebooked(entry, ids) if entry.pod_uid == uid else entry for entry in content.entries
    )
    changed = checkpoint.Checkpoint(entries, content.registered)
    checkpoint.replace(directory, changed, random.Random())  # noqa: S311 -- a file's name


def _rebooked(
    entry: checkpoint.CheckpointEntry, ids: Mapping[str, str]
) -> checkpoint.CheckpointEntry:
    return checkpoint.CheckpointEntry(
        pod_uid=entry.pod_uid,
        container=entry.container,
        resource=entry.resource,
        numa={node: [ids[one] for one in held] for node, held in entry.numa.items()},
        response=entry.response,
    )
