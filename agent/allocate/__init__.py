"""Answers Allocate and GetPreferredAllocation."""
