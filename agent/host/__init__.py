"""Adapters to this host: files, threads, lock, cgroups, CDI, systemd.

Each implements a Protocol of agent.ports and translates foreign errors into agent.errors.
An adapter never decides policy. Threads are started here and in agent.gpu only.
"""
