"""The MySQL and MariaDB driver: jobs are rows of one table, which consumers poll."""
