"""All workers of a connection, on every host: stopped and restarted (``flags``), and listed (``presence``)."""
