"""Pods, the Node and their annotations, reduced to the fields that the agent uses.

It may never hold a field that nothing uses.
"""
