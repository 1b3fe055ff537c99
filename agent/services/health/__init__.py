"""Watching GPUs: what the driver reports and probes find become verdicts, and news for people.

It may never judge, which agent.core.health does, and never let a report or a hang pass unseen.
"""
