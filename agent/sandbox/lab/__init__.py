"""A cluster of one node on this machine: all models in this process, the agent as its child.

It may never touch anything outside its own temporary directory and loopback, and never signal a
process that it did not start.
"""
