"""A model of HAMi's scheduler v2.10: webhook, filter, score, node lock and bind.

It decides as the real one does, reasons and event texts included, so that it can place pods in the
sandbox and explain why one is pending. It is kinder than the real one nowhere: its requests, their
order and their waits are HAMi's. It may read and write the object store only, and never an agent's
memory.

- A pod that is bound costs 9 requests, an attempt that finds the lock taken costs 6; Events, lists
  and watches included. A test that needs a quick client queue says so.
- A bind of a bound pod that is tried again fails and releases the lock. A lost answer of a binding
  costs the lock. Patches go by name, so a pod that was created again gets its predecessor's marks.
  No verb has a deadline; kube-scheduler gives up after 30 s while HAMi works on.
- Seven recorded histories of HAMi's scheduler judge the order of the writes, the gaps, the GPUs and
  the time in all. 12,000 random pods (quotas, topology, steering, weights, init containers) were
  decided as by HAMi 2.10, reasons and scores included.

Not modelled: MIG, other vendors, the order of requests of releases before 2.5 (2.4 reads the clock
after the lock), and the tenth and later Event of one reason, which client-go combines.
A burst is placed faster than on a real cluster: 35 s where the recording took 50 s, whose last pod
waited for its back-off.
"""
