"""How often the ledger is held against the kubelet's books, in both modes; numbers are seconds."""

import datetime as dt

PERIOD = 60.0
"""Between complete looks when nothing happens."""

QUIET = 0.5
"""Without any Allocate before a List: it can un-mark ids that are just being given out."""

PAUSE = 1.0
"""Between looks at an answer that the kubelet has not booked yet."""

SETTLING = 30.0
"""In which a new kubelet learns its pods: it knows none at first."""

SETTLING_PAUSE = 3.0
"""Between complete looks meanwhile, as long as the kubelet has not named the holders of all."""

RETRIES = (1.0, 2.0, 5.0, 15.0)
"""Until the next complete look after the first ones in a row that failed."""

THROTTLED_PAUSE = 0.02
"""Until PodResources is asked again that was over its rate limit, 100 a second for all."""

DEADLINE = 2.0
"""For one question, or for one directory."""

UNCONFIRMED_AFTER = dt.timedelta(seconds=60)
"""A row that the kubelet has not confirmed for so long is counted and shown."""
