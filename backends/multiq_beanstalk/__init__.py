"""The beanstalkd driver. A queue is a tube. A lease is a reservation by one connection."""
