"""Registers with the kubelet, follows its instances, and watches for rival device plugins.

It may never answer a call of the kubelet.
"""
