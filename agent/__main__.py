"""The process: arguments and environment in, exit code out."""

import gc
import os
import signal
import sys

# Thousands of objects are made while modules load and none of them dies: collecting among them
# costs a tenth of the start. `dispatch` enables it again once the verb's modules are there.
gc.disable()

from agent.cli.main import dispatch  # noqa: E402 -- after the line above
from agent.cli.output import own_streams  # noqa: E402 -- on purpose


def main() -> int:
    """Run the verb that the command line names."""
    own_streams()

    # A shell without job control starts `command &` with SIGINT ignored, and Python keeps that:
    # neither Ctrl-C nor `kill -INT` would end the process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_plugin = sys.argv[0].endswith("kubectl-hami")
    return dispatch(sys.argv[1:], os.environ, "kubectl hami" if is_plugin else "hami-agent")


if __name__ == "__main__":
    sys.exit(main())
