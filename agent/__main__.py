"""The process: arguments and environment in, exit code out."""

import os
import sys

from agent.cli.main import dispatch


def main() -> int:
    """Run the verb that the command line names."""
    return dispatch(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
