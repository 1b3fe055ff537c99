"""The HTTP server for people and Prometheus: probes, metrics, version.

It renders the values of cells. It never changes a fact or calls the driver or the API server.
"""
