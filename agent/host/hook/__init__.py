"""HAMi-core's directories on the host, which containers have mounted and may write.

It may never follow a link, trust what it finds in them, or let one container's directory hold up
what is done for another one.
"""
