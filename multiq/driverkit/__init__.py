"""Tools that drivers share: sockets, name resolution, TLS, wake-ups, polling, forks, clocks, repeated calls, checks of
replies, files of SQL statements, pages of listings, job records as of now, external transactions.
"""
