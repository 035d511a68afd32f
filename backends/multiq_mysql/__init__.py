"""The MySQL and MariaDB driver. Jobs are rows of one table, and consumers poll that table."""
