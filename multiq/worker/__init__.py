"""The worker: reserves jobs, runs their tasks, renews their leases while they run, and settles them."""

from .worker import Worker

__all__ = ["Worker"]
