"""No password is shown in the repr of an object, a URL or an error."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from rich.pretty import pretty_repr

from multiq.backend.registry import open_backend
from multiq.errors import MultiqError, UrlInvalid
from multiq.settings.model import Settings
from multiq.settings.url import parse_url
from multiq_mysql.dsn import Dsn as MysqlDsn
from multiq_redis.connection_settings import ConnectionSettings as RedisSettings

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "S3CR3T"
URL = f"redis://ann:{CANARY}@localhost/0"


@pytest.mark.parametrize(
    "shown",
    [
        Settings(url=URL, connections={"main": URL}),
        parse_url(URL, {}),
        RedisSettings("ann", CANARY, 3),
        MysqlDsn(database="shop", host="db", username="ann", fixed_password=CANARY),
        [RedisSettings(None, CANARY)],
    ],
    ids=lambda shown: type(shown).__name__,
)
def test_the_repr_of_an_object_has_no_password(shown: object) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    console.print(shown)
    texts = (
        repr(shown),
        str(shown),
        f"{shown}",
        pretty_repr(shown),
        pretty_repr(shown, max_depth=9),
        printed.getvalue(),
    )
    for text in texts:
        assert CANARY not in text
    assert any(word in repr(shown) for word in ("ann", "Login", "Settings", "***"))


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:p@ss/{CANARY}@h/0",
        f"redis://u:p/{CANARY}@h/0",
        f"redis://u:{CANARY}/x@h/0",
        f"redis://u:p@ss/{CANARY}@h:1/0?timeout=x",
        f"mysql://u:p@ss/{CANARY}@h/shop",
        f"mysql://u:p@ss/{CANARY}@h/shop/more",
        f"redis+sentinel://u:p@ss/{CANARY}@h/service/0",
        f"beanstalk://u:p@ss/{CANARY}@h",
    ],
)
def test_an_unquoted_password_is_not_shown_in_parts(url: str) -> None:
    with pytest.raises(MultiqError) as caught:
        open_backend(url)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_redis_reads_a_password_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    path.write_text(f"{CANARY}\n")
    monkeypatch.setenv("REDIS_SECRET", f"{CANARY}-2")
    assert RedisSettings(password_file=str(path)).password == CANARY
    assert RedisSettings("ann", password_env="REDIS_SECRET").password == f"{CANARY}-2"  # noqa: S106
    assert RedisSettings().password is None
    with pytest.raises(UrlInvalid, match="is not set"):
        _ = RedisSettings(password_env="NOWHERE").password  # noqa: S106
    for query in ("?password_env=A&password_file=b", "?password_env=A"):
        with pytest.raises(UrlInvalid, match="given twice"):
            open_backend(f"redis://{'' if '&' in query else 'u:p@'}h/0{query}")
