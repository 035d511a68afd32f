"""Tools that drivers share: sockets, names, TLS, wake-ups, forks, clocks, repeated calls, guarded replies, external
transactions.
"""
