"""A model of one node's kubelet (1.36), as far as a device plugin can observe it.

It serves Registration and PodResources on real unix sockets, dials plugins, admits pods one by one,
keeps the checkpoint file, and crashes where the real kubelet does. It knows no GPU and no
annotation, and it may never import the agent's services, doors or host adapters.

tests/peers compares it with kubelet 1.36.3. Rules that only the real program showed:

- After a failed re-registration, the old connection stays and still carries Allocates. A Register
  in progress loses the ids when the old stream ends.
- If a pod worker is refused, `waiting.message` has only the plugin's text.
- Ids of a resource that the Node does not publish are compared with what is held.
- After a lost checkpoint, the Node still offers what it offered before.
- A deletion that began before an Allocate ends during it.
- A rejection in the first seconds reaches the API server with the report after 10 s.

Not modelled: PreStartContainer, checks of a resource's name, topology hints, registration by socket
path (1.37), redials of a plugin that does not listen, ids listed twice, malformed answers, a
checkpoint that cannot be written, and the second look at the Node if a pod's selector does not
match. Not compared: lists just under 4 MiB, a reboot, and the panic of overlapping calls. One
difference is known: if a restarted kubelet rejects a pod whose containers exit with 0, the real pod
ends as Succeeded, here as Failed.
"""
