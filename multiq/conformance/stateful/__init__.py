"""Random walks: a backend and the memory backend take the same steps, and every answer is compared."""
