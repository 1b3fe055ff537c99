"""The ledger against the kubelet, in both modes, and container directories that nobody holds.

It may never close a row, or remove a directory, on half a view of the pods or the kubelet.
"""
