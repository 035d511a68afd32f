"""The beanstalkd driver: a queue is a tube, a lease is a reservation by one connection."""
