"""Whether a node is fit to serve, before, during and after the agent runs on it.

It may never change the node.
"""
