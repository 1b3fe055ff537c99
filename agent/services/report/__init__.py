"""Writes the Node's register annotation and posts Events about the Node.

It may never write what the API server already holds.
"""
