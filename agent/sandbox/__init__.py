"""Models of the agent's peers: simulated hardware, kubelet, API server and scheduler.

Tests and `hami-agent sandbox` run the unchanged agent against them over real sockets. A model
follows the rules of the program it stands for and keeps its own state, so that killing the agent
heals nothing. No room below this one (plugin, web, services, host, codec, core, kit) may ever
import it.
"""
