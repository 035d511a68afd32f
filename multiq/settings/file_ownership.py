"""Checks whether multiq may trust a file. Only the current user and root may be able to change a trusted file."""

from __future__ import annotations

import os
import stat


def distrust(link: os.stat_result, file: os.stat_result) -> str | None:
    """Return the reason not to trust a file, or None if the file is safe.

    *link* is the ``lstat`` of the file's path, which may be a symbolic link. *file* is the ``fstat`` of the opened
    file. The owner's private group, which some systems create for each user, may write the file.
    """
    if not hasattr(os, "geteuid"):  # Windows has no POSIX owners
        return None
    trusted = {0, os.geteuid()}
    for status in (link, file):
        if status.st_uid not in trusted:
            return f"it belongs to user {status.st_uid}, neither to you (user {os.geteuid()}) nor to root"
    mode = stat.S_IMODE(file.st_mode)
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private_group(file.st_gid, file.st_uid)):
        return f"its mode {mode:04o} lets other users write it; chmod go-w makes it yours alone"
    return None


def _is_private_group(group_id: int, user_id: int) -> bool:
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(user_id), grp.getgrgid(group_id)
    except KeyError:
        return False
    return user.pw_gid == group_id and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
