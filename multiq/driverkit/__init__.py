"""Tools that drivers share: sockets, name resolution, TLS, wake-ups, polling, forks, clocks, repeated calls, checks of
replies, files of SQL statements, pages of listings, job records at the present time, and the application's own
transactions.
"""
