"""How often the ledger is compared with the kubelet, in both modes. All numbers are seconds."""

import datetime as dt

PERIOD = 60.0
"""Between Lists when nothing happens."""

QUIET = 0.5
"""Without an Allocate before a List. A List can un-mark ids that an Allocate is giving out."""

PAUSE = 1.0
"""Between Gets for an answer that the kubelet has not booked yet."""

SETTLING = 30.0
"""For a new kubelet to learn its pods. It knows none at first."""

SETTLING_PAUSE = 3.0
"""Between Lists in this time, until the kubelet has named the holders of all rows."""

RETRIES = (1.0, 2.0, 5.0, 15.0)
"""Until the next List after the first, second, … failure in a row."""

THROTTLED_PAUSE = 0.02
"""Until PodResources is asked again after it throttled a call: it serves 100 calls a second."""

DEADLINE = 2.0
"""For one call to the kubelet, or for one directory."""

UNCONFIRMED_AFTER = dt.timedelta(seconds=60)
"""After this time a row that the kubelet has not confirmed counts as unconfirmed."""
