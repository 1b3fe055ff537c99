"""Finds the node's GPUs, withholds or lists their slices for the kubelet, and samples their usage.

It may never judge the health of a GPU.
"""
