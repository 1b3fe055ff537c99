"""A model of one node's kubelet, as far as a device plugin can see it: 1.36 and its real rules.

It serves Registration and PodResources on real unix sockets, dials plugins, admits pods one by
one, keeps the checkpoint file and dies the deaths that the real one dies. It knows no GPU and no
annotation, and it may never import the agent's services, doors or host adapters.
"""
