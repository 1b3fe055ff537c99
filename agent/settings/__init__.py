"""The agent's settings: their schema, their sources in order, and the origin of each value."""
