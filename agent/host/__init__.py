"""Adapters to the outside world: driver, kubelet, API server, disk, directories, systemd, clock.

Each implements a Protocol of agent.core.ports and translates foreign errors into agent.core.errors.
An adapter may never decide policy and never import another adapter. Threads live only here.
"""
