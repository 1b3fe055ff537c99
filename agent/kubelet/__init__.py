"""The doors at the kubelet."""
