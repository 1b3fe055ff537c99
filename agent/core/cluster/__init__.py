"""Pods, the Node and the annotations on them, as far as they decide something here.

It may never hold more of an object than is used.
"""
