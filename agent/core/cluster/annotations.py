"""Names of HAMi's annotations and the words they carry. External: none may be renamed.

Source: HAMi pkg/util/types.go, pkg/device/nvidia/device.go (equal from v2.4.0 to v2.10.0).
"""

PREFIX = "hami.io/"

REGISTER = "hami.io/node-nvidia-register"
"""On the Node: the inventory, written by the node's agent, read by the scheduler."""
SCORE = "hami.io/node-nvidia-score"
"""On the Node: how well each pair of GPUs is joined, for schedulers that place by topology."""
HANDSHAKE = "hami.io/node-handshake"
"""On the Node: a stamp that makes the scheduler read the register annotation again."""
MUTEX_LOCK = "hami.io/mutex.lock"
"""On the Node: the scheduler's lock, held from Bind until the pod's last answer."""
CORDON = "hami.io/device-cordon"
"""On the Node: GPUs that an operator keeps from the scheduler. Never ours to write."""

TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
"""On the pod: the groups that are not served yet."""
ALLOCATED = "hami.io/vgpu-devices-allocated"
"""On the pod: all groups, consumed by nobody."""
BIND_PHASE = "hami.io/bind-phase"
"""On the pod: allocating, success or failed."""
BIND_TIME = "hami.io/bind-time"
"""On the pod: when it was bound, in Unix seconds by the scheduler's clock."""
VGPU_NODE = "hami.io/vgpu-node"
"""On the pod: the node that the scheduler chose."""
VGPU_TIME = "hami.io/vgpu-time"
"""On the pod: when the scheduler chose it, in Unix seconds."""

PHASE_ALLOCATING = "allocating"
PHASE_SUCCESS = "success"
PHASE_FAILED = "failed"

TEXT_LIMIT = 256 * 1024
"""All annotations of an object together may have 256 KiB: a longer text is no annotation."""

MIRROR = "kubernetes.io/config.mirror"
"""On the pod: it mirrors a static pod, one that the kubelet reads from a file."""

REPORTS = "hami-agent/reports"
"""On the Node: the agent found the register annotation of another writer true, and left it so."""
