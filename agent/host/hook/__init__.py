"""HAMi-core's directories on the host, which containers mount and may write.

It never follows a link, never trusts their content, and never lets one container's directory delay
the work for another container.
"""
