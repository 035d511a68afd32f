"""The Redis driver. Hashes and sorted sets hold a queue's jobs, and Lua scripts change them."""
