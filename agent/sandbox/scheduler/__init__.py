"""A model of HAMi's scheduler v2.10: webhook, filter, score, node lock and bind.

It decides as the real one does, reasons and event texts included, so that it can place pods in the
sandbox and explain why one is pending. It is kinder than the real one nowhere: its requests, their
order and their waits are HAMi's. MIG and other vendors are not modelled. It may read and write the
object store only, and never an agent's memory.
"""
