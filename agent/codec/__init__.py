"""Decodes and encodes annotations, the node lock, the checkpoint, API objects and settings files.

It does no I/O and never guesses: malformed input raises MalformedText, which says where.
"""
