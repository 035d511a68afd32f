"""The processes of a worker: the supervisor, its children, the sidecar, and what they share."""
