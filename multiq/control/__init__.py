"""Commands to all workers of a connection, on every host, and the list of these workers."""
