"""Runs the scheduler model as extender and webhook of a real kube-scheduler and API server.

It follows all nodes and pods and writes what HAMi's scheduler writes. It may never decide anything
itself: filter, bind and admission are the scheduler model's.
"""
