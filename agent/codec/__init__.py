"""Text and bytes to values and back: annotations, node lock, checkpoint, API objects.

It may never do I/O, and never guess: malformed input raises MalformedText, which says where.
"""
