"""Answering the kubelet: one inquiry per call, then prepare, commit, answer.

It may never answer before the row is on disk, and never wait for the API server beyond one LIST.
"""
