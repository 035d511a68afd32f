"""The SQLite driver. All processes of one machine share the jobs in one file, without a server."""
