"""Keys and values of HAMi's annotations. They are HAMi's contract: none may be renamed.

Source: HAMi pkg/util/types.go, pkg/device/nvidia/device.go (equal from v2.4.0 to v2.10.0).
"""

PREFIX = "hami.io/"

REGISTER = "hami.io/node-nvidia-register"
"""On the Node: the inventory. The agent writes it, the scheduler reads it."""
SCORE = "hami.io/node-nvidia-score"
"""On the Node: the points of each pair of GPUs, for schedulers that place by topology."""
HANDSHAKE = "hami.io/node-handshake"
"""On the Node: a time stamp that makes the scheduler read the register annotation again."""
MUTEX_LOCK = "hami.io/mutex.lock"
"""On the Node: the scheduler's lock, held from Bind until the pod's last answer."""
CORDON = "hami.io/device-cordon"
"""On the Node: GPUs that an operator excludes from scheduling. The agent never writes it."""

TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
"""On the pod: the groups that no device plugin has served yet."""
ALLOCATED = "hami.io/vgpu-devices-allocated"
"""On the pod: all groups. No device plugin removes any."""
BIND_PHASE = "hami.io/bind-phase"
"""On the pod: allocating, success or failed."""
BIND_TIME = "hami.io/bind-time"
"""On the pod: when the scheduler bound it, in Unix seconds of the scheduler's clock."""
VGPU_NODE = "hami.io/vgpu-node"
"""On the pod: the node that the scheduler chose."""
VGPU_TIME = "hami.io/vgpu-time"
"""On the pod: when the scheduler chose it, in Unix seconds."""

PHASE_ALLOCATING = "allocating"
PHASE_SUCCESS = "success"
PHASE_FAILED = "failed"

TEXT_LIMIT = 256 * 1024
"""Bytes. Kubernetes allows 256 KiB for all annotations of an object together."""

MIRROR = "kubernetes.io/config.mirror"
"""On the pod: it is the mirror of a static pod, which the kubelet reads from a file."""
