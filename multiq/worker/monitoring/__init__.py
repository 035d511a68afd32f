"""Monitoring of one worker: its status, health file, HTTP pages, metrics, and the summary in its log."""
