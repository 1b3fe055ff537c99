"""What a node must have, and what is wrong with one."""
