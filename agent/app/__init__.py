"""The composition root: builds adapters, cells, services and doors, and runs them in tiers.

It may never decide anything of the domain; it is the only room that joins the others.
"""
