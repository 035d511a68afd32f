"""The settings of a session: isolation, SQL mode, time zone, and how long statements wait for locks.

Each session of the driver sets them when it opens (``Pool.open``). So the driver does not depend on the server's
defaults.
"""

from __future__ import annotations

_LOCK_WAIT = 2  # seconds that a statement waits for a row. Then the server gives up, and the transaction is run again.
_IDLE_TRANSACTION = 10  # seconds that a transaction may be idle. The driver's transactions are never idle.
_IDLE_SESSION = 600  # seconds until the server ends the session of a process that died, which releases its locks

#: READ COMMITTED needs a statement of its own, because MySQL and MariaDB have different names for the variable.
SESSION_SETTINGS = (
    "SET SESSION time_zone = '+00:00', SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
    f"SESSION innodb_lock_wait_timeout = {_LOCK_WAIT}, SESSION lock_wait_timeout = 10, "
    "SESSION completion_type = 0, SESSION sql_safe_updates = 0, SESSION sql_select_limit = DEFAULT, "
    # MariaDB has a shorter limit for sessions that are idle inside a transaction. MySQL ignores the text in /*M! ...
    # */.
    f"SESSION wait_timeout = LEAST(@@wait_timeout, {_IDLE_SESSION}) "
    f"/*M!100300 , SESSION idle_transaction_timeout = {_IDLE_TRANSACTION} */"
    # Without this setting, MariaDB makes a temporary table of a long IN (...), and reads all jobs to join them with
    # that table.
    "/*M!100308 , SESSION in_predicate_conversion_threshold = 0 */"
    # Without this setting, MariaDB does not use the index for more than 32,000 numbers in one IN (...).
    "/*M!100600 , SESSION optimizer_max_sel_arg_weight = 0 */;"
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE"
)
