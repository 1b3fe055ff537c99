"""The kubelet's socket: which kubelet is there, registration with it, and rivals for the name.

It may never answer a call of the kubelet.
"""
