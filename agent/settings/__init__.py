"""The agent's settings: their schema, their sources in order, and the origin of each value.

This package starts nothing and guesses nothing: a missing key has its documented default, and a
wrong one is refused with its file and line.
"""
