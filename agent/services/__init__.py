"""Standing activities, each with a run() that a supervisor keeps alive.

A service owns one fact or one duty. It may never import another service or an adapter: it takes
Protocols, cells and its own section of the settings; only agent.app joins them.
"""
