"""A model of HAMi's scheduler v2.10: webhook, filter, score, node lock and bind.

It makes the decisions of the real scheduler, with its reasons and event texts. Its requests, their
order and their waits are also HAMi's. It may read and write only the object store, and never an
agent's memory.

- Binding a pod costs 9 requests; an attempt that finds the lock taken costs 6, including Events,
  lists and watches. A test that needs a quick client queue says so.
- A second bind of a bound pod fails and releases the lock, and so does a binding whose answer is
  lost. Patches go by name, so a pod that was created again can get annotations of its predecessor.
- No verb has a deadline. kube-scheduler gives up after 30 s while HAMi continues.
- Tests compare it with what HAMi's own code answered, including reasons, scores and texts.

Not modelled: MIG, other vendors, pod groups, earlier releases, the policies topology-aware and
numa, weights of the score, and the tenth and later Event of one reason, which client-go combines. A
burst is placed faster than on a real cluster: in 35 s instead of the recorded 50 s, in which the
last pod waited for its back-off.
"""
