"""Models of the agent's peers: simulated hardware, kubelet, API server and scheduler.

Tests and `hami-agent sandbox` run the unchanged agent against them over real sockets. A model
follows the rules of its program and keeps its own state, so that killing the agent repairs nothing.
Only agent.cli and agent.app may import it.
"""
