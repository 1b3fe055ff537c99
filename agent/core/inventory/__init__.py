"""Which GPUs are shared on this node, how, and how they are: values without judgement.

It may never ask a driver, nor decide who gets a share.
"""
