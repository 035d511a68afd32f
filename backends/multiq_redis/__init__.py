"""The Redis driver: jobs in sorted sets and one hash per queue, every move a Lua script."""
