"""Exit codes of the verbs: how good the answer is. The daemon's are agent.app.codes."""

OK = 0
PROBLEM = 1
"""The answer is: something is wrong."""
USAGE = 2
UNREACHABLE = 3
NOT_FOUND = 4
UNWRITTEN = 74
"""The answer could not be written, whatever it is."""
INTERRUPTED = 130
