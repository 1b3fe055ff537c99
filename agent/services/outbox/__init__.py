"""Performs the effects that follow an answer: settle pods, release locks, post Events.

It may never write an effect that is not owed, nor remove a lock whose text is not the effect's.
"""
