"""A defect to order: after SIGUSR1 this process never comes back to its event loop."""

import signal
import types


def _spin(_number: int, _frame: types.FrameType | None) -> None:
    while True:
        pass


signal.signal(signal.SIGUSR1, _spin)
