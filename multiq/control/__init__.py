"""Controlling all workers of a connection, on every host: down and restart (``flags``), and their list (``presence``)."""
