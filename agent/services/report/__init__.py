"""What the Node carries of this agent: the register annotation and Events.

It may never write what is already there.
"""
