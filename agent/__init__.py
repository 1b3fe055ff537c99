"""hami-agent: shares the NVIDIA GPUs of one node among Kubernetes pods."""

__version__ = "0.2.0"
