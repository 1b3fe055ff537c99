"""The default scenario: runs the agent in a sandbox and checks its claims one by one.

It may never change a fact of the agent's own, and never count a claim as true without a check.
"""
