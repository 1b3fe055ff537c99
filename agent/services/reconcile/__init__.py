"""Corrects the ledger to what the kubelet holds, and removes unused container directories.

It may never close a row, or remove a directory, on an incomplete view of the pods or the kubelet.
"""
