"""Adapters to this host: files, threads, lock, cgroups, CDI, systemd."""
