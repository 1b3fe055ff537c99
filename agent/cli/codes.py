"""Exit codes of the verbs. Those of the daemon are in agent.app.codes."""

OK = 0
PROBLEM = 1
"""The command ran, and its answer is that something is wrong."""
USAGE = 2
UNREACHABLE = 3
NOT_FOUND = 4
PARTIAL = 5
"""The answer is incomplete; it says what is missing."""
UNWRITTEN = 74
"""The answer could not be written."""
INTERRUPTED = 130
