"""The worker: reserves jobs, runs their tasks, settles what came of them, and keeps their leases alive meanwhile."""

from .worker import Worker

__all__ = ["Worker"]
