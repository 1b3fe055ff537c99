"""The ledger against the kubelet and the API server: what is confirmed, over, owed or left on disk.

It finds and may never act.
"""
