"""Explains one pod by HAMi's own rules: gate by gate, and what would place it.

It is a pure decision about a snapshot of the cluster. It may never read the cluster itself.
"""
