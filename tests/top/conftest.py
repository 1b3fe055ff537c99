"""These tests need the extra `cli`, which has an environment of its own: `make test-top`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("textual") else ["test_*.py"]
