"""The domain: values and decisions, pure and synchronous.

It may never touch a clock, a disk, a socket, an event loop, a log or a generated message: whatever
it needs arrives as an argument, whatever it decides leaves as a value.
"""
