"""The health of GPUs: from driver events and probes to verdicts, Events and the Node condition.

It may never do input or output, and never take a missing answer for a good one.
"""
