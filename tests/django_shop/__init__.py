"""A project of Django's for tests: settings, one app, an admin, and tasks."""
