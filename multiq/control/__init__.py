"""Controlling all workers of a connection, on every host (``flags``: down, restart), and their list (``presence``)."""
