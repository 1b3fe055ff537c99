"""The ledger beside what the kubelet and the API server say."""
