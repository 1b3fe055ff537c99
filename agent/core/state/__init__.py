"""The state that outlives the process: ledger, health memory and last good settings.

It may never write to a disk.
"""
