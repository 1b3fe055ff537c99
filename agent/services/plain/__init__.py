"""Plain mode: the kubelet's ids decide, and no API server is needed.

It may never give two containers one directory, or close a row that a container may live by.
"""
