"""Compares the ledger with the kubelet and the API server: rows, effects and directories.

It may never act: it only returns findings.
"""
