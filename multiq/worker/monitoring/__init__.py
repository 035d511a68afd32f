"""Monitoring of one worker: status, health file, HTTP pages, metrics, and the summary in the log."""
