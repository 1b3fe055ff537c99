"""The API server: client, objects, watches, Events."""
