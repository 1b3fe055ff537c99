"""A model of HAMi's scheduler v2.10: webhook, filter, score, node lock and bind.

It makes the decisions of the real scheduler, with its reasons and event texts. Its requests, their
order and their waits are also HAMi's. It may read and write only the object store, and never an
agent's memory. Tests compare it with what HAMi's own code answered.

- Binding a pod costs 9 requests; an attempt that finds the lock taken costs 6, including Events. A
  test that needs a quick client queue says so.
- A second bind of a bound pod fails and releases the lock, and so does a binding whose answer is
  lost. Patches go by name, so a pod that was created again can get annotations of its predecessor.

Not modelled: MIG, other vendors, pod groups, earlier releases, the policies topology-aware and
numa, weights of the score, quotas in the webhook (the filter has them), Events that client-go
combines, and the 30 s after which kube-scheduler gives up.
"""
