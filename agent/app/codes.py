"""Exit codes of the daemon, after sysexits. systemd restarts it on all except BAD_SETTINGS."""

OK = 0
NO_DRIVER = 69
BUG = 70
OS_ERROR = 71
RESTART = 75
NO_PERMISSION = 77
BAD_SETTINGS = 78
