"""Controlling all workers of a connection, on every host: down, restart (``flags``), and who works (``presence``)."""
