"""Sealed payloads: signed, encrypted, compressed. What is opened, what is refused, and the exact bytes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multiq
from multiq import Payloads
from multiq.backend import Backend, Consumer, NewJob
from multiq.backend.memory import MemoryBackend, MemoryConsumer
from multiq.errors import BackendUnavailable, EnqueueUncertain, OptionInvalid, PayloadInvalid, SettingsInvalid
from multiq.payloads import Key
from multiq.payloads.seal import Seal, SealBroken
from multiq.payloads.sealed_backend import SealedBackend, SealedConsumer
from multiq.settings import PayloadSettings
from multiq.settings.loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOLDEN = Path(__file__).parent / "golden" / "seal_1"


def key(name: str, first: int = 0) -> str:
    return f"{name}:{base64.b64encode(bytes(range(first, first + 32))).decode()}"


A, B, E = key("a"), key("b", 32), key("e", 64)
BODY = b'{"multiq":1,"task":"pay","args":["4111 1111",7]}'
MOST = 1 << 20

WAYS = {
    "signed": Payloads(sign=[A]),
    "encrypted": Payloads(encrypt=[E]),
    "compressed": Payloads(compress=0),
    "signed and encrypted": Payloads(sign=[A], encrypt=[E]),
    "all": Payloads(sign=[A], encrypt=[E], compress=0),
}


def seal(**options: Any) -> Seal:
    return Seal(Payloads(**options), MOST)


@pytest.mark.parametrize("way", WAYS)
@given(plain=st.one_of(st.binary(max_size=500), st.just(BODY), st.just(BODY * 50), st.just(b'{"a":1}')))
def test_what_is_sealed_opens_to_the_same_bytes(way: str, plain: bytes) -> None:
    sealed = Seal(WAYS[way], MOST)
    stored = sealed.close("job", "mail", "7", plain)
    assert sealed.open("job", "mail", "7", stored) == plain


# --- the exact bytes ---

#: file name -> how it was made, and what is in it
GOLDEN_FILES: dict[str, tuple[Payloads, bytes]] = {
    "signed_job": (WAYS["signed"], BODY),
    "signed_bytes": (WAYS["signed"], b"\x00\xffraw"),
    "encrypted_job": (WAYS["encrypted"], BODY),
    "all_three": (WAYS["all"], BODY * 20),
}


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_bytes_open(name: str) -> None:
    payloads, plain = GOLDEN_FILES[name]
    stored = (GOLDEN / f"{name}.json").read_bytes().strip()
    assert Seal(payloads, MOST).open("job", "mail", "0190f6a0", stored) == plain
    if name.startswith("signed"):  # a signature has no random part
        assert Seal(payloads, MOST).close("job", "mail", "0190f6a0", plain) == stored


def test_another_program_can_sign_by_the_documented_rules() -> None:
    import hashlib
    import hmac

    # given only the description in docs/payloads.md, and no code of multiq
    secret = base64.b64decode(A.partition(":")[2])
    context = b'["multiq-seal-1","job","mail","7","pay",["hmac-sha256"],"","a"]\n'
    sig = base64.b64encode(hmac.new(secret, context + BODY, hashlib.sha256).digest()).decode()
    head = b'{"multiq":3,"seal":["hmac-sha256"],"task":"pay","signed_with":"a",'
    stored = head + b'"body":' + BODY + b',"sig":"' + sig.encode() + b'"}'
    # then multiq accepts it
    assert seal(sign=[A]).open("job", "mail", "7", stored) == BODY


# --- what is refused ---


@pytest.mark.parametrize("way", ["signed", "encrypted", "signed and encrypted", "all"])
@pytest.mark.parametrize(
    "moved", [("job", "other", "7"), ("job", "mail", "8"), ("memo", "mail", "7"), ("outcome", "mail", "7")], ids=str
)
def test_sealed_bytes_belong_to_one_queue_job_and_use(way: str, moved: tuple[Any, str, str]) -> None:
    sealed = Seal(WAYS[way], MOST)
    stored = sealed.close("job", "mail", "7", BODY)
    with pytest.raises(SealBroken, match="belongs to another job or queue"):
        sealed.open(*moved, stored)


@pytest.mark.parametrize("way", ["signed", "encrypted", "signed and encrypted", "all"])
def test_no_byte_of_sealed_bytes_can_be_changed(way: str) -> None:
    sealed = Seal(WAYS[way], MOST)
    plain = BODY * 3 if way == "all" else BODY
    stored = sealed.close("job", "mail", "7", plain)
    refused = 0
    for at in range(len(stored)):
        changed = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        try:
            assert sealed.open("job", "mail", "7", changed) == plain, (at, changed)
        except PayloadInvalid:
            refused += 1
    assert refused >= len(stored) - 2  # the last character of base64 may have unused bits


@pytest.mark.parametrize(
    ("payloads", "complaint"),
    [
        (Payloads(sign=[A]), "it is not signed, and this program accepts only signed payloads"),
        (Payloads(encrypt=[E]), "it is not encrypted, and this program accepts only encrypted payloads"),
        (Payloads(sign=[A], encrypt=[E]), "it is not signed"),
    ],
    ids=["sign", "encrypt", "both"],
)
@pytest.mark.parametrize(
    "forged",
    [
        BODY,
        b"raw",
        b"",
        b'{"multiq":3,"seal":[],"task":"pay","body":' + BODY + b"}",
        b'{"multiq":3,"seal":["zlib"],"task":"pay","data":"' + base64.b64encode(zlib.compress(BODY)) + b'"}',
        b'{"multiq": 3, "seal": [], "body": ' + BODY + b"}",
    ],
    ids=["plain", "raw", "empty", "no steps", "compressed", "spaces"],
)
def test_a_payload_without_a_key_is_refused_once_there_are_keys(
    payloads: Payloads, complaint: str, forged: bytes
) -> None:
    with pytest.raises(SealBroken, match=complaint):
        Seal(payloads, MOST).open("job", "mail", "7", forged)
    # unless the program is told to accept it
    lenient = msgspec.structs.replace(payloads, accept_unsigned=True)
    assert Seal(lenient, MOST).open("job", "mail", "7", forged) in {BODY, b"raw", b""}


def test_a_signature_cannot_be_left_out_of_encrypted_bytes() -> None:
    stored = seal(encrypt=[E]).close("job", "mail", "7", BODY)
    with pytest.raises(SealBroken, match="it is not signed"):
        seal(sign=[A], encrypt=[E]).open("job", "mail", "7", stored)


@pytest.mark.parametrize("steps", [["hmac-sha256", "zlib"], ["rot13"], ["zlib", "zlib"]], ids=str)
def test_unknown_steps_and_orders_are_refused(steps: list[str]) -> None:
    stored = json.dumps({"multiq": 3, "seal": steps, "data": ""}).encode()
    with pytest.raises(SealBroken, match="and this multiq knows zlib, aes256gcm, hmac-sha256"):
        seal(compress=0).open("job", "mail", "7", stored)


def test_compressed_data_does_not_expand_without_limit() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(MOST + 1))).decode()
    stored = json.dumps({"multiq": 3, "seal": ["zlib"], "data": bomb}).encode()
    with pytest.raises(SealBroken, match="it expands to more than 1,048,576 bytes"):
        seal(compress=0).open("job", "mail", "7", stored)
    cut = base64.b64encode(zlib.compress(BODY)[:-4]).decode()
    stored = json.dumps({"multiq": 3, "seal": ["zlib"], "data": cut}).encode()
    with pytest.raises(SealBroken, match="its end is missing"):
        seal(compress=0).open("job", "mail", "7", stored)


@given(junk=st.binary(max_size=300))
def test_junk_is_refused_with_a_typed_error(junk: bytes) -> None:
    for stored in (junk, b'{"multiq":3,"seal":["zlib","aes256gcm","hmac-sha256"],"data":"' + junk + b'"}'):
        with pytest.raises(SealBroken):
            Seal(WAYS["all"], MOST).open("job", "mail", "7", stored)


# --- rotation ---


def test_keys_are_rotated_without_a_gap() -> None:
    old, new = seal(sign=[A]), seal(sign=[B])
    both_old, both_new = seal(sign=[A, B]), seal(sign=[B, A])

    def can(reader: Seal, writer: Seal) -> bool:
        try:
            return reader.open("job", "mail", "7", writer.close("job", "mail", "7", BODY)) == BODY
        except SealBroken:
            return False

    # first all programs learn the new key, then they use it, then the old key is removed
    assert can(both_old, old)
    assert can(old, both_old)
    assert can(both_old, both_new)
    assert can(both_new, both_old)
    assert can(new, both_new)
    assert not can(new, old)
    with pytest.raises(SealBroken, match="it is signed with key 'a', which this program does not have"):
        new.open("job", "mail", "7", old.close("job", "mail", "7", BODY))


def test_a_key_with_the_same_id_and_another_secret_is_noticed() -> None:
    stored = seal(encrypt=[key("e", 1)]).close("job", "mail", "7", BODY)
    with pytest.raises(SealBroken, match="or its key has another secret"):
        seal(encrypt=[E]).open("job", "mail", "7", stored)


# --- keys and settings ---


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("S3CR3T-canary", "a key must be text like '2027-01:...'"),
        ("a b:S3CR3T-canary", "a key must be text like"),
        ("a:S3CR3T-canary", r"the secret of key 'a' must be 32 random bytes in base64 .*, got \d+ bytes"),
        ("a:", "got 0 bytes"),
    ],
)
def test_wrong_keys_are_refused_without_showing_them(text: str, complaint: str) -> None:
    for option in ("sign", "encrypt"):
        with pytest.raises(OptionInvalid, match=complaint) as caught:
            Payloads(**{option: [text]})  # type: ignore[arg-type]
        assert "canary" not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


@pytest.mark.parametrize("after", ["AAAA", f",{A}", f" {A}", "!", "\n\nb"])
def test_a_key_has_nothing_behind_its_secret(after: str) -> None:
    # such as a second key, which would not be used
    with pytest.raises(OptionInvalid, match="the secret of key 'a' must be 32 random bytes"):
        Payloads(sign=[A + after])
    assert Key(A.rstrip("=").replace("+", "-").replace("/", "_")) == Key(f"{A}\n") == Key(A)


@pytest.mark.parametrize(
    "use",
    [
        lambda: Payloads(compress=A),  # type: ignore[arg-type]
        lambda: Payloads(compress=[A]),  # type: ignore[arg-type]
        lambda: Payloads(accept_unsigned=A),  # type: ignore[arg-type]
        lambda: multiq.App("memory://", payloads={"sign": [A]}).backend,  # type: ignore[arg-type]
        lambda: multiq.App("memory://", payloads=[A]).backend,  # type: ignore[arg-type]
        lambda: multiq.App("memory://", payloads=A).backend,  # type: ignore[arg-type]
    ],
)
def test_a_key_in_the_place_of_another_option_is_not_shown(use: Callable[[], object]) -> None:
    with pytest.raises(OptionInvalid, match=r"got a (str|list|dict)") as caught:
        use()
    assert A.partition(":")[2] not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


def test_keys_show_no_secret() -> None:
    secret = A.partition(":")[2]
    settings = multiq.Settings(url="memory://", payload=PayloadSettings(sign=(A,), encrypt=(E,)))
    app = multiq.App(settings=settings)
    backend = app.backend
    texts = [repr(Key(A)), repr(Payloads(sign=[A])), repr(settings), repr(app), repr(backend), str(settings)]
    assert all(secret not in text for text in texts)
    assert "Key('a')" in repr(settings)


@pytest.mark.parametrize("where", ["file", "environment"])
def test_keys_are_settings(tmp_path: Path, where: str) -> None:
    # given keys in a file, whose secrets are in the environment, or in the environment only
    environment = {"MULTIQ_URL": "memory://"}
    if where == "file":
        (tmp_path / "multiq.toml").write_text('[payload]\nsign = ["${NEW}", "${OLD}"]\ncompress = 1000\n')
        environment |= {"NEW": B, "OLD": A}
    else:
        environment |= {"MULTIQ_PAYLOAD_SIGN": f"{B},{A}", "MULTIQ_PAYLOAD_COMPRESS": "1000"}
    # then an app uses these keys
    backend = multiq.App(settings=load_settings(tmp_path, environment)).backend
    assert isinstance(backend, SealedBackend)
    assert backend.payloads == Payloads(sign=[B, A], compress=1000)


def test_a_key_that_is_not_set_is_named_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "multiq.toml").write_text('[payload]\nsign = ["${MISSING}", "a:S3CR3T-canary"]\n')
    with pytest.raises(SettingsInvalid, match=r"a key refers to \$\{MISSING\}, which is not set") as caught:
        load_settings(tmp_path, {})
    assert "canary" not in str(caught.value)


def test_an_app_without_keys_has_the_driver_itself() -> None:
    assert type(multiq.App("memory://").backend) is MemoryBackend
    assert type(multiq.App("memory://", payloads=Payloads()).backend) is MemoryBackend


def test_wrong_options_are_refused() -> None:
    with pytest.raises(OptionInvalid, match=r"payloads must be a multiq\.Payloads, got"):
        _ = multiq.App("memory://", payloads={"sign": [A]}).backend  # type: ignore[arg-type]
    with pytest.raises(OptionInvalid, match="the ids of keys must differ, got a, a"):
        Payloads(sign=[A, key("a", 1)])
    with pytest.raises(OptionInvalid, match="compress must be a number of bytes from 0, or None, got -1"):
        Payloads(compress=-1)
    with pytest.raises(SettingsInvalid):
        PayloadSettings(sign=("nonsense",))


def test_signing_and_compressing_need_no_cryptography_library() -> None:
    program = (
        "import sys\n"
        "sys.modules['cryptography'] = None\n"
        "import multiq\n"
        f"multiq.App('memory://', payloads=multiq.Payloads(sign=[{A!r}], compress=10)).queue().enqueue('x' * 1000)\n"
        "try:\n"
        f"    multiq.Payloads(encrypt=[{E!r}])\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "ExtraNotInstalled encryption needs cryptography: pip install 'multiq[crypto]'\n"


# --- the backend around another one ---


@pytest.mark.parametrize(("wrapper", "base"), [(SealedBackend, Backend), (SealedConsumer, Consumer)])
def test_the_wrapper_passes_on_every_method_of_the_seam(wrapper: type, base: type) -> None:
    # given the public methods of the driver interface, because methods of the base class would not reach the driver
    # these methods need only the declared capability
    own = {"from_url", "unsupported", "check_terms", "shortened", "in_order"}
    names = {name for name in vars(base) if not name.startswith("_")} - own
    missing = {name for name in names if getattr(wrapper, name, None) is getattr(base, name)}
    assert missing - {"options", "gathers_enqueues", "queues", "capabilities"} == set()


def test_another_backend_of_the_app_is_sealed_too() -> None:
    other = MemoryBackend()
    app = multiq.App("memory://", payloads=Payloads(sign=[A]))
    with app.using(other):
        handle = app.queue().enqueue(7)
        assert other.peek("default", handle.id).body.startswith(b'{"multiq":3')
        assert handle.peek().value == 7


def test_an_uncertain_enqueue_has_the_caller_s_jobs_and_repeats_them_sealed() -> None:
    class Deaf(MemoryBackend):
        is_deaf = True

        def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
            ids = super().enqueue(queue, jobs, connection=connection)
            if self.is_deaf:
                raise EnqueueUncertain(queue, jobs, "the reply is lost")
            return ids

    store = Deaf()
    app = multiq.App(backend=store, payloads=Payloads(sign=[A], encrypt=[E]))
    with pytest.raises(EnqueueUncertain) as caught:
        app.queue().enqueue({"card": 4111})
    assert [job.body for job in caught.value.jobs] == [b'{"card":4111}']
    store.is_deaf = False
    handle = caught.value.repeat()
    assert b"4111" not in store.peek("default", handle.id).body
    assert [job.value for job in app.queue().jobs("ready")] == [{"card": 4111}]


def test_a_job_that_replaces_another_one_is_opened_under_the_other_one_s_id() -> None:
    app = multiq.App("memory://", payloads=Payloads(sign=[A], encrypt=[E]))
    seen: list[str] = []

    @app.task(unique=multiq.Unique(by=(), on_conflict="replace"))
    def index(page: str) -> None:
        seen.append(page)

    first = index.enqueue("old")
    second = index.enqueue("new")
    assert second.id == first.id
    multiq.Worker(app, stop_when_empty=True).run()
    assert seen == ["new"]


@pytest.mark.parametrize("payloads", [Payloads(), Payloads(sign=[B])])
def test_a_program_that_cannot_open_a_job_does_not_say_that_its_outcome_is_not_kept(payloads: Payloads) -> None:
    app = multiq.App("memory://", payloads=Payloads(sign=[A], encrypt=[E]))

    @app.task(keep=60)
    def pay(card: str) -> None: ...

    ref = pay.enqueue("4111 1111").ref
    assert isinstance(app.backend, SealedBackend)
    other = multiq.App(backend=app.backend.inner, payloads=payloads)
    with pytest.raises(multiq.OutcomeUnknown, match=r"is queued; the payload is sealed \(aes256gcm, hmac-sha256\)"):
        other.job(ref).result(timeout=0)


def test_a_refused_job_that_cannot_be_buried_keeps_no_other_job_back(monkeypatch: pytest.MonkeyPatch) -> None:
    app = multiq.App("memory://", payloads=Payloads(sign=[A]))
    assert isinstance(app.backend, SealedBackend)
    app.backend.inner.enqueue("default", [NewJob(b'{"order":6}', "a" * 32)])
    app.queue().enqueue({"order": 7})

    def fail(*_: object) -> None:
        raise BackendUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryConsumer, "settle", fail)
        jobs = app.queue().reserve_many(10, timeout=0)
    assert [job.body for job in jobs] == [{"order": 7}]
    jobs[0].ack()
