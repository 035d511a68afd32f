"""Tools that drivers share: sockets, names, TLS, wake-ups, forks, clocks, guarded replies, external transactions."""
