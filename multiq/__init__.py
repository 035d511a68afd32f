"""multiq: job queues behind one API, over backends that share nothing but a contract."""
