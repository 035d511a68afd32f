"""Tools that drivers share: sockets, names, TLS, wake-ups, polling, forks, clocks, repeated calls, guarded replies,
statement files, pages, records as of now, external transactions.
"""
