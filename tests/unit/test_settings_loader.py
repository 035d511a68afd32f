"""The sources of settings, their order, and errors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiq.errors import SettingsInvalid
from multiq.settings.loader import find_file, load_settings
from multiq.settings.model import KEYS, Settings
from multiq.settings.url import parse_url

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "S3CR3T-canary"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def problems_of(folder: Path, **environment: str) -> tuple[str, ...]:
    with pytest.raises(SettingsInvalid) as caught:
        load_settings(folder, environment)
    return caught.value.problems


# --- sources ---------------------------------------------------------------------------------------------


def test_without_a_file_and_without_variables_the_defaults_hold(tmp_path: Path) -> None:
    assert load_settings(tmp_path, {}) == Settings()


def test_a_file_sets_every_key(tmp_path: Path) -> None:
    write(
        tmp_path / "multiq.toml",
        """
        url = "main"
        max_body = 1000
        max_result = 2000
        [connections]
        main = "redis://localhost"
        [worker]
        queues = ["high", "default"]
        processes = 2
        threads = 4
        concurrency = 8
        prefetch = 5
        grace = 1.5
        [log]
        level = "debug"
        format = "json"
        """,
    )
    settings = load_settings(tmp_path, {})
    assert settings.resolve(None) == "redis://localhost"
    assert (settings.max_body, settings.max_result) == (1000, 2000)
    worker = settings.worker
    assert worker.queues == ("high", "default")
    assert (worker.processes, worker.threads, worker.concurrency, worker.prefetch) == (2, 4, 8, 5)
    assert (worker.grace, settings.log.level, settings.log.format) == (1.5, "debug", "json")


def test_the_environment_sets_every_key() -> None:
    environment = {
        "MULTIQ_URL": "redis://localhost",
        "MULTIQ_STORE": "redis://other",
        "MULTIQ_APP": "shop.tasks:app",
        "MULTIQ_INCLUDE": "shop.mail, shop.orders",
        "MULTIQ_MAX_BODY": "1000",
        "MULTIQ_MAX_RESULT": "2000",
        "MULTIQ_WORKER_QUEUES": "high, default",
        "MULTIQ_WORKER_POLICY": "round-robin",
        "MULTIQ_WORKER_PROCESSES": "2:4",
        "MULTIQ_WORKER_SCALE_UP_AFTER": "0.5",
        "MULTIQ_WORKER_SCALE_DOWN_AFTER": "60",
        "MULTIQ_WORKER_THREADS": "4",
        "MULTIQ_WORKER_CONCURRENCY": "8",
        "MULTIQ_WORKER_PREFETCH": "5",
        "MULTIQ_WORKER_GRACE": "1.5",
        "MULTIQ_WORKER_KILL_AFTER": "0.5",
        "MULTIQ_WORKER_HEALTH_FILE": "/run/shop/health",
        "MULTIQ_WORKER_HTTP": "localhost:9000",
        "MULTIQ_PAYLOAD_SIGN": f"a:{'A' * 43}=",
        "MULTIQ_PAYLOAD_ENCRYPT": f"b:{'B' * 43}=",
        "MULTIQ_PAYLOAD_COMPRESS": "1000",
        "MULTIQ_PAYLOAD_ACCEPT_UNSIGNED": "yes",
        "MULTIQ_LOG_LEVEL": "DEBUG",
        "MULTIQ_LOG_FORMAT": "json",
        "MULTIQ_LOG_JOBS": "yes",
        "MULTIQ_LOG_SLOW_JOB": "2.5",
        "MULTIQ_LOG_SUMMARY": "30",
    }
    assert set(environment) == {f"MULTIQ_{key.upper().replace('.', '_')}" for key in KEYS}
    settings = load_settings(None, environment)
    assert settings.worker.queues == ("high", "default")
    worker = settings.worker
    assert (worker.processes, worker.scale_up_after, worker.scale_down_after) == ("2:4", 0.5, 60.0)
    assert settings.app == "shop.tasks:app"
    assert (settings.url, settings.max_body, settings.worker.grace, settings.log.level) == (
        "redis://localhost",
        1000,
        1.5,
        "debug",
    )
    assert settings.include == ("shop.mail", "shop.orders")
    assert [key.id for key in (*settings.payload.sign, *settings.payload.encrypt)] == ["a", "b"]
    assert (settings.payload.compress, settings.payload.accept_unsigned) == (1000, True)
    assert (settings.log.jobs, settings.log.slow_job, settings.log.summary) == (True, 2.5, 30.0)
    with pytest.raises(SettingsInvalid, match="must be true or false, got maybe"):
        load_settings(None, {"MULTIQ_LOG_JOBS": "maybe"})


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", '[worker]\nthreads = 4\nprocesses = 2\n[log]\nlevel = "debug"')
    settings = load_settings(tmp_path, {"MULTIQ_WORKER_THREADS": "7"})
    assert (settings.worker.threads, settings.worker.processes, settings.log.level) == (7, 2, "debug")


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", 'url = "redis://a"')
    assert load_settings(tmp_path, {"MULTIQ_URL": "", "MULTIQ_CONFIG": ""}).url == "redis://a"


def test_unknown_variables_are_ignored(tmp_path: Path) -> None:
    assert load_settings(tmp_path, {"MULTIQ_PORT": "tcp://10.0.0.1:80", "MULTIQ_WORKER_PORT": "80"}) == Settings()


def test_the_nearest_file_upwards_holds(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path / "multiq.toml", 'url = "redis://top"')
    assert load_settings(inner, {}).url == "redis://top"
    write(tmp_path / "a" / "pyproject.toml", '[tool.multiq]\nurl = "redis://middle"')
    assert load_settings(inner, {}).url == "redis://middle"
    write(tmp_path / "a" / "multiq.toml", 'url = "redis://beside"')
    assert load_settings(inner, {}).url == "redis://beside"


def test_a_pyproject_without_our_table_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", 'url = "redis://top"')
    write(
        tmp_path / "a" / "pyproject.toml", '# [tool.multiq]\n[project]\nname = "multiq-shop"\n[tool.ruff]\nfix = true'
    )
    assert load_settings(tmp_path / "a", {}).url == "redis://top"


def test_a_broken_pyproject_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", 'url = "redis://top"')
    write(tmp_path / "a" / "pyproject.toml", "multiq multiq multiq")
    write(tmp_path / "b" / "pyproject.toml", 'tool = "multiq"')
    assert load_settings(tmp_path / "a", {}).url == "redis://top"
    write(tmp_path / "b" / "pyproject.toml", "tool = 1 # multiq")
    assert load_settings(tmp_path / "b", {}).url == "redis://top"


def test_multiq_config_names_the_file(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", 'url = "redis://here"')
    other = write(tmp_path / "etc" / "other.toml", 'url = "redis://there"')
    assert load_settings(tmp_path, {"MULTIQ_CONFIG": str(other)}).url == "redis://there"


def test_a_deleted_current_folder_has_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert find_file(None, {}) is None
    assert load_settings(None, {}) == Settings()


# --- references ------------------------------------------------------------------------------------------


def test_a_reference_stands_for_a_password_and_is_quoted_there(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", '[connections]\nmain = "mysql://ann:${DB_PASSWORD}@${DB_HOST}/shop"')
    settings = load_settings(tmp_path, {"DB_PASSWORD": "p@ss/w#rd?%", "DB_HOST": "db:3306"})
    url = parse_url(settings.resolve("main"), {})
    assert (url.password, url.host, url.port) == ("p@ss/w#rd?%", "db", 3306)


def test_a_reference_may_stand_for_a_whole_url(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", 'url = "${REDIS_URL}"\n[connections]\nmain = "${REDIS_URL}"')
    settings = load_settings(tmp_path, {"REDIS_URL": "redis://:p%40ss@host/0"})
    assert settings.url == settings.connections["main"] == "redis://:p%40ss@host/0"


def test_a_reference_to_an_unset_variable_is_reported(tmp_path: Path) -> None:
    source = write(tmp_path / "multiq.toml", '[connections]\nmain = "redis://:${NOWHERE}@host"')
    assert problems_of(tmp_path) == (
        f"{source}: connections.main: 'redis://:***@host' refers to ${{NOWHERE}}, which is not set",
    )


# --- mistakes --------------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_at_once_with_their_place(tmp_path: Path) -> None:
    source = write(
        tmp_path / "multiq.toml",
        """
        urll = "redis://a"
        max_body = "big"
        worker = { thread = 4, processes = -1, queues = ["a b"] }
        log = "loud"
        zebra = 1
        [connections]
        main = 3
        "a b" = "redis://a"
        """,
    )
    problems = problems_of(tmp_path, MULTIQ_WORKER_GRACE="soon", MULTIQ_URL="nowhere")
    told = "\n".join(problems)
    for part in (
        f"{source}: urll: unknown key (did you mean url?)",
        f"{source}: max_body: must be a whole number from 1 to 2147483648, got big",
        f"{source}: worker.thread: unknown key (did you mean worker.threads?)",
        f"{source}: worker.processes: must be a whole number from 0 to 1024, got -1",
        f"{source}: worker.queues: a queue name must have",
        f"{source}: log: must be a table: [log]",
        f"{source}: zebra: unknown key (there are: url, ",
        f"{source}: connections.main: must be a URL",
        f"{source}: connections.a b: a connection name must have",
        "environment: MULTIQ_WORKER_GRACE: must be a number of seconds from 0 to 86400, got soon",
        "environment: MULTIQ_URL: 'nowhere' is neither a URL",
    ):
        assert part in told
    assert len(problems) == 11


def test_a_misspelt_section_is_recognised(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", "[wroker]\nthreads = 1")
    assert "did you mean worker?" in problems_of(tmp_path)[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"url = ", "is not TOML"),
        (b"url = 'a\xff'", "is not TOML"),
    ],
)
def test_a_file_that_is_not_toml_is_reported(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "multiq.toml").write_bytes(content)
    assert says in problems_of(tmp_path)[0]


def test_a_named_file_that_is_missing_or_a_folder_is_reported(tmp_path: Path) -> None:
    missing = problems_of(tmp_path, MULTIQ_CONFIG=str(tmp_path / "no.toml"))
    assert missing == (f"{tmp_path / 'no.toml'}: cannot be read: No such file or directory",)
    assert problems_of(tmp_path, MULTIQ_CONFIG=str(tmp_path)) == (f"{tmp_path}: cannot be read: Is a directory",)


def test_a_tool_key_that_is_not_a_table_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[tool]\nmultiq = 3")
    assert "must be a table" in problems_of(tmp_path)[0]
    assert "must be a table" in problems_of(tmp_path, MULTIQ_CONFIG=str(tmp_path / "pyproject.toml"))[0]


def test_a_folder_that_cannot_be_looked_into_has_no_settings_but_those_above_it_may(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", 'url = "redis://top"')
    assert load_settings(tmp_path / ("x" * 300), {}).url == "redis://top"  # the system refuses such a name


def test_a_named_file_that_the_system_refuses_is_reported(tmp_path: Path) -> None:
    assert "cannot be read: File name too long" in problems_of(tmp_path, MULTIQ_CONFIG="x" * 300)[0]


@pytest.mark.parametrize(
    "text",
    [
        f'url = ["redis://:{CANARY}@host"]',
        f'url = {{ a = "redis://:{CANARY}@host" }}',
        f'max_body = "redis://:{CANARY}@host"',
        f'[connections]\nmain = "redis:/:{CANARY}@host"',
        f'[connections]\nmain = "redis://:{CANARY}@${{NOWHERE}}"',
        f'[connections]\nmain = ["redis://:{CANARY}@host"]',
        f'url = "ann:{CANARY}@host"',
        f'[worker]\nqueues = "redis://:{CANARY}@host"',
    ],
)
def test_no_mistake_shows_a_password(tmp_path: Path, text: str) -> None:
    write(tmp_path / "multiq.toml", text)
    assert CANARY not in "\n".join(problems_of(tmp_path))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(KEYS)), values)
def test_any_value_is_taken_or_refused_with_one_error(key: str, value: object) -> None:
    try:
        checked = KEYS[key].check(value)
    except ValueError:
        return
    assert checked == KEYS[key].check(checked)


@given(st.sampled_from(sorted(KEYS)), st.text(min_size=1, max_size=10))
def test_any_text_of_the_environment_is_accepted_or_reported(key: str, text: str) -> None:
    variable = f"MULTIQ_{key.upper().replace('.', '_')}"
    problems: tuple[str, ...] = ()
    try:
        load_settings(None, {variable: text})
    except SettingsInvalid as exc:
        problems = exc.problems
    assert all(problem.startswith(f"environment: {variable}: ") for problem in problems)


@pytest.mark.parametrize(
    "text",
    [
        "url = " + "[" * 5000 + "]" * 5000,
        "max_body = " + "9" * 5000,
        "max_body = 0x" + "f" * 50_000,
        "a" + ".a" * 5000 + " = 1",
        '[connections]\nmain = "main"',
        'url = "main"\n[connections]\nmain = "redis"',
        'url = "a"\n[connections]\na = "a"',
        'url = "a://"',
        "#" * 2_000_000,
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("name", ["multiq.toml", "other.toml", "pyproject.toml"])
def test_no_file_makes_anything_but_its_own_error(tmp_path: Path, text: str, name: str) -> None:
    source = write(tmp_path / name, text)
    for environment in ({}, {"MULTIQ_CONFIG": str(source)}):
        with contextlib.suppress(SettingsInvalid):
            load_settings(tmp_path, environment).resolve(None)


@pytest.mark.parametrize("name", ["multiq.toml", "pyproject.toml"])
def test_a_tool_that_is_text_holds_no_settings(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, 'tool = "multiq"')
    if name == "pyproject.toml":
        assert load_settings(tmp_path, {}) == Settings()
        assert load_settings(tmp_path, {"MULTIQ_CONFIG": str(source)}) == Settings()


def test_a_url_may_be_the_name_of_a_connection_of_one_letter(tmp_path: Path) -> None:
    write(tmp_path / "multiq.toml", 'url = "a"\n[connections]\na = "redis://localhost"')
    assert load_settings(tmp_path, {}).resolve(None) == "redis://localhost"
