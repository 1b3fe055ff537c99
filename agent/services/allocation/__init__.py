"""Answering the kubelet: one inquiry per call, then prepare, commit, answer; in plain mode by ids.

It may never answer before the row is on disk, give two containers one directory, or wait for the
API server beyond one LIST.
"""
