"""What holds for every test."""

import asyncio

# On Python 3.11 pytest-asyncio asks for "the current loop" before its first test; asyncio then
# makes one that nobody closes, and its ResourceWarning fails whatever test runs later.
asyncio.set_event_loop(None)
