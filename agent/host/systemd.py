"""Notifies the service manager by sd_notify datagrams, if there is one."""

import datetime as dt
import socket
import time
from collections.abc import Mapping

import structlog

log = structlog.get_logger(__name__)


class Systemd:
    """The ServiceNotifier port over the datagram socket `address` (`@…`: an abstract one).

    Without an address there is no service manager, and nothing is sent. A message that cannot be
    sent is logged and lost. Source: sd_notify(3).
    """

    def __init__(self, address: str = "", watchdog: dt.timedelta | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog = watchdog
        """The longest time allowed between two calls of alive(), or None."""

    def ready(self) -> None:
        """Report that the service serves, at first or again after a reload."""
        self._send("READY=1")

    def status(self, text: str) -> None:
        """Set the line in `systemctl status`."""
        self._send(f"STATUS={' '.join(text.split())}")

    def stopping(self) -> None:
        """Report that the service is about to end."""
        self._send("STOPPING=1")

    def reloading(self) -> None:
        """Report that a reload began, with its time of CLOCK_MONOTONIC (Type=notify-reload)."""
        stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={stamp}")

    def alive(self) -> None:
        """Send the watchdog's keep-alive."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(message.encode(), self._address)
        except OSError as error:
            word = message.partition("=")[0]
            log.warning("systemd.not_told", message=word, err=error.strerror)


def service_notifier(environment: Mapping[str, str], pid: int) -> Systemd:
    """The notifier for the service manager that started this process (`pid`), if one did."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        if address:
            log.warning("systemd.unknown_address", address=address[:64])
        return Systemd()
    # Whether the watchdog applies to this process: sd_watchdog_enabled(3).
    text = environment.get("WATCHDOG_USEC", "")
    is_ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
    if not is_ours or not text.isascii() or not text.isdigit() or not int(text):
        return Systemd(address)
    return Systemd(address, dt.timedelta(microseconds=int(text)))
