"""Alarms that ring unless somebody deals with them in time, and whose deadlines move."""
