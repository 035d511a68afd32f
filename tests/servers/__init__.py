"""Real servers that tests start for themselves, one module for each kind; ``process`` is what they share."""
