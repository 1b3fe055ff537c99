"""What containers use of their GPUs, as HAMi-core's shared regions tell it.

It may never trust a number of a region: any process of the container may write there.
"""
