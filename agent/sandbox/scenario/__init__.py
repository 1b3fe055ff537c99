"""The default scenario: what the agent promises, acted out on a sandbox and checked claim by claim.

It may never change a fact of the agent's own, and never call a claim true that it did not see.
"""
