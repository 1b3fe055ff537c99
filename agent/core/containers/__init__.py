"""What a container receives: environment, mounts, device nodes, CDI names.

Equal inputs give equal bytes. It may never decide which container receives them.
"""
