"""What the kubelet makes of an error on its way into a pod's status."""


def because(error: str) -> str:
    """The message of a pod that was rejected because of an error of the device manager."""
    return f"Pod was rejected: Allocate failed due to {error}, which is unexpected"
