"""What a worker tells of itself: its status, its health file, its metrics."""
