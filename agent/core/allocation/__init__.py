"""One Allocate: which container it is for, what that may get, and which ids to prefer.

It may never wait: what it does not know, it asks for as a question.
"""
