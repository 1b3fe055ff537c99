"""Becoming root in a container: own mounts, one directory, the capabilities of containerd."""

import ctypes
import os
import tempfile

DEFAULT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""What containerd leaves a container's root: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP."""
IMMUTABLE = 9
"""CAP_LINUX_IMMUTABLE, which a pod has to ask for."""

_NEW_MOUNTS = 0x00020000
_BIND, _PRIVATE = 0x1000, 0x44000
_DROP_FROM_BOUNDS = 24
_LAST = 63
_VERSION = 0x20080522
_NO_NEW_PRIVILEGES = 38


def enter(directory: str, capabilities: tuple[int, ...]) -> None:
    """From now on this process sees `directory` alone, as /; it is uid 0 with these capabilities.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.unshare(_NEW_MOUNTS))
    _done(libc.mount(None, b"/", None, _PRIVATE, None))
    root = tempfile.mkdtemp(prefix="hami-tenant-")
    _done(libc.mount(directory.encode(), root.encode(), None, _BIND, None))
    os.chroot(root)
    os.chdir("/")
    for number in range(_LAST + 1):
        if number not in capabilities:
            libc.prctl(_DROP_FROM_BOUNDS, number, 0, 0, 0)  # those that this kernel lacks fail
    _done(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    bits = sum(1 << number for number in capabilities)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    _done(libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)))


def _done(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
