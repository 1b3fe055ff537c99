"""The driver of the GPUs, by NVML."""
