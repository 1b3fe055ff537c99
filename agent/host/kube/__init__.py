"""The API server, reached through kubernetes_asyncio: this Node, the pods of this node, Events.

It may never list or watch anything else, cache an object, or decide when to ask again. Importing
this package loads neither kubernetes_asyncio nor aiohttp: the first request does, on a thread.
"""
