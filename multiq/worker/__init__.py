"""The worker: reserves jobs, runs their tasks, settles their outcomes, and renews their leases meanwhile."""

from .worker import Worker

__all__ = ["Worker"]
