"""What outlives the process: ledger, rows and effects, memory of health, last good settings.

It may never write itself to a disk.
"""
