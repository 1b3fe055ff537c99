"""Reads a whole cluster for commands, with the rights of the operator who runs them.

It may never write, and the running agent never uses it: an agent reads only its own Node and pods.
"""
