"""The page for people at `/`: one HTML document, rendered from the documents of the read API.

It may never act, load anything from elsewhere, or put text of the cluster into it unescaped.
"""
