"""Exit codes. A daemon's follow sysexits; a verb's say how good the answer is."""

OK = 0
PROBLEM = 1
"""The answer is: something is wrong."""
USAGE = 2
UNREACHABLE = 3
NOT_FOUND = 4
INTERRUPTED = 130

NO_DRIVER = 69
BUG = 70
OS_ERROR = 71
NO_PERMISSION = 77
BAD_SETTINGS = 78
