"""The same schedules in each library, for ``peers.lateness``."""

SCHEDULES = 20
