"""The ledger against the kubelet, and the container directories that nobody holds any more.

It may never close a row, or remove a directory, on half a view of the pods or the kubelet.
"""
