"""How GPUs are: what the driver and probes report of one becomes a verdict, and what is left of it.

It may never look at the world itself, and never take silence for good news.
"""
