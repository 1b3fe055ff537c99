"""Effects that follow an answer, until done: pods settled, locks let go, Events posted.

It may never write what nothing owes, nor take a lock whose text is not the one that is owed.
"""
