"""The NVIDIA driver through its management library: one adapter, several modules.

It may never decide what an event or an answer means for a GPU, never let one GPU's failure become
another's, and never wait for the driver on the event loop.
"""
