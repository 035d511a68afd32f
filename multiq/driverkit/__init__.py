"""What drivers share: sockets, TLS, wake-ups, forks, clocks, checked replies, transactions of the application."""
