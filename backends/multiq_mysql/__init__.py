"""The MySQL and MariaDB driver: a table that is polled with care."""
