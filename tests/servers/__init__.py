"""Private, real servers for tests, one module a server; ``process`` is what they share."""
