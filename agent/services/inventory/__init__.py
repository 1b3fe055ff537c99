"""The node's GPUs as facts: found, withheld, listed for the kubelet, their usage sampled.

It may never judge the health of a GPU.
"""
