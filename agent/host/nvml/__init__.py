"""The client of the NVIDIA driver, over its management library NVML.

It never decides what an event or an answer means for a GPU, never lets one GPU's failure affect
another, and never waits for the driver on the event loop.
"""
