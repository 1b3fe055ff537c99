"""Exit codes of the daemon, after sysexits; systemd restarts on all but BAD_SETTINGS."""

OK = 0
NO_DRIVER = 69
BUG = 70
OS_ERROR = 71
RESTART = 75
NO_PERMISSION = 77
BAD_SETTINGS = 78
