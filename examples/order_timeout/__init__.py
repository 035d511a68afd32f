"""Orders that cancel themselves unless they are paid in time, in the same transaction as the order itself."""
