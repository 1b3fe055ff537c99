"""Adapters to the outside world: driver, kubelet, API server, disk, directories, systemd, clock.

Each implements a Protocol of agent.ports and translates foreign errors into agent.errors.
An adapter never decides policy and never imports another adapter. Only adapters start threads.
"""
