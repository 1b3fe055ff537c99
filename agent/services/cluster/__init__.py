"""Follows the pods of this node and this Node, with one watch each.

It may never list or watch anything else.
"""
