"""Building blocks for asyncio: observable cells, supervised tasks, tiers, delays, log lines.

It may never contain a word of the domain: no GPU, no pod, no kubelet.
"""
