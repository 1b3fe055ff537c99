"""Answers the kubelet's Allocate calls: decides, prepares the directory, commits the row, answers.

It may never answer before the row is on disk, give two containers one directory, or wait for the
API server beyond one LIST.
"""
