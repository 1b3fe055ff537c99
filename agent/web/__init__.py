"""The door to people and Prometheus: probes, metrics, version.

It reads cells and renders. It may never change a fact and never call the driver or the API server.
"""
