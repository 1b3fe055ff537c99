"""The command line: one file per verb; fetching apart from rendering.

It may never hold logic of the agent: a verb parses, calls, prints and returns an exit code.
"""
