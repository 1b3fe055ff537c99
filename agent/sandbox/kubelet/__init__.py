"""A model of one node's kubelet, as far as a device plugin can see it: 1.36 and its real rules.

It serves Registration and PodResources on real unix sockets, dials plugins, admits pods one by
one, keeps the checkpoint file and dies the deaths that the real one dies. It knows no GPU and no
annotation, and it may never import the agent's services, doors or host adapters.

tests/peers puts the same questions to kubelet 1.36.3. Rules that only the real program showed:

- After a failed re-registration the old connection stays and still carries Allocates. A Register
  that is under way loses the ids when the old stream ends.
- A refusal by a pod worker stands in `waiting.message` in the plugin's words alone.
- A pod whose selector does not match is measured once more without what it holds itself. Ids of a
  resource that the Node does not publish are measured against what is held.
- After a lost checkpoint the Node goes on offering what it offered.
- A deletion that began before an Allocate ends during it.
- A rejection in the first seconds reaches the API server with the ten-second report.

Not compared with the real kubelet: topology hints, registration by socket path (1.37), lists just
under 4 MiB, a reboot, and the panic of overlapping calls. One difference is known: when a restarted
kubelet rejects a pod whose containers exit with 0, the pod ends as Succeeded there, as Failed here.
"""
