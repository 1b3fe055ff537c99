"""This node's pods and this Node, each as one watch shows them.

It may never list or watch anything else.
"""
