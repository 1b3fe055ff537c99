"""Adapters to the outside world: driver, kubelet, API server, disk, directories, systemd, clock.

Each implements a Protocol of agent.core.ports and translates foreign errors into agent.core.errors.
An adapter never decides policy and never imports another adapter. Only adapters start threads.
"""
