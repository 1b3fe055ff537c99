"""Judgements about the node before, during and after a run of the agent.

It may never change the node.
"""
