"""Control of all workers of a connection, on every host: take down and restart (``flags``), list (``presence``)."""
