"""Kills the session whose connection was lost, when the connection is replaced. Until the server notices the loss,
consumers skip the jobs that the lost session has locked.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pymysql

if TYPE_CHECKING:
    from pymysql.connections import Connection

# How often a killed session is checked for its end, and the seconds between two checks.
_KILL_CHECKS, _KILL_CHECK_PAUSE = 50, 0.004


def session_id(opened: Any) -> int:
    return int(opened.thread_id())


def is_same_server(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether both identities belong to the same server, without a restart in between. The start times may differ by 1
    s."""
    return before[:-1] == now[:-1] and abs(before[-1] - now[-1]) <= 1


def kill_lost_session(opened: Connection[Any], lost: int) -> None:
    """Kill the session *lost* over a new connection to the same server, and wait for its end.

    An account needs no privilege to kill its own sessions. The caller does not call this if the server has changed or
    was restarted, because another session may then have this id. The ids of one server only rise.
    """
    if session_id(opened) <= lost:
        return
    with contextlib.suppress(pymysql.MySQLError), opened.cursor() as cursor:
        cursor.execute(f"KILL {lost:d}")
        for _ in range(_KILL_CHECKS):
            cursor.execute(f"SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = {lost:d}")  # noqa: S608
            if not cursor.fetchall():
                break
            time.sleep(_KILL_CHECK_PAUSE)
