"""The SQLite driver: jobs in one file, shared by the processes of one machine, without a server."""
