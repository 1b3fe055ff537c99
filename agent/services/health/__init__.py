"""Watching GPUs: what the driver reports and what probes find become verdicts.

It may never judge, which agent.core.health does, and never let a report or a hang pass unseen.
"""
