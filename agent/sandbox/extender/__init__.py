"""The scheduler model beside a real kube-scheduler: its extender, and its admission webhook.

It follows all nodes and pods of a real API server and writes there what HAMi's scheduler writes.
It may never decide anything itself: filter, bind and admission are the scheduler model's.
"""
