"""The device plugin server, which the kubelet calls by gRPC, and its registration.

It translates messages to values and values to messages. It never decides or stores anything, and
waits for nothing but its services.
"""
