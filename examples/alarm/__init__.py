"""Alarms that ring unless they are resolved in time, and whose deadlines move."""
