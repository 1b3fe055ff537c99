"""Samples what containers use of their GPUs, and switches their limits in HAMi-core's regions.

It may never delay an Allocate, or write a region of a container without a row. Exception: the first
round releases what another process held back.
"""
