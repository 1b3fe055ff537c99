"""The door to the kubelet: the device plugin's gRPC server.

It translates messages to values and values to messages. It may never decide, store or wait for
anything but the services it is given.
"""
