"""What the operator chose: schema, sources in order, origin of every value.

It may never start anything and never fill a gap with a guess: a missing key is its documented
default, a wrong one is refused with its file and line.
"""
