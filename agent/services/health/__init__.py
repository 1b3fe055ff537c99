"""Watches the health of GPUs: driver events and probes become verdicts, Events and a condition.

It may never judge, which agent.core.health does, and never lose a report or overlook a hang.
"""
