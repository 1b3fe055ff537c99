"""The command line, one file per verb.

It never holds logic of the agent: a verb parses, calls, prints and returns an exit code.
"""
