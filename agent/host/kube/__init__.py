"""The client of the API server, over kubernetes_asyncio: this Node, its pods, Events.

It never lists or watches anything else (`cluster` and `leftovers`, for commands, do), caches no
object and decides no retry. Importing this
package loads neither kubernetes_asyncio nor aiohttp: the first request does, on a thread.
"""
