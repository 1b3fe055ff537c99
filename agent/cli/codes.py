"""Exit codes of the verbs, and how a verb fails. Those of the daemon are in agent.app.codes."""

import sys

from agent.errors import cap

OK = 0
PROBLEM = 1
"""The command ran, and its answer is that something is wrong."""
USAGE = 2
UNREACHABLE = 3
NOT_FOUND = 4
INCOMPLETE = 5
"""The answer was given, but a part of the data could not be read."""
WARNED = 6
"""There are only warnings, and `--strict` was given."""
UNWRITTEN = 74
"""The answer could not be written."""
INTERRUPTED = 130


def fail(verb: str, text: str, code: int) -> int:
    """Say on standard error why the verb fails, safe to show; return the exit code."""
    sys.stderr.write(f"hami-agent {verb}: {cap(text, 4096)}\n")
    return code
