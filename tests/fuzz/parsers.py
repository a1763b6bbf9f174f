"""What parses bytes that others have written, one function each, as fuzzers call it.

A function returns when the bytes are accepted or refused in the way that its parser promises. Everything else is a
finding: another exception, an answer that contradicts the bytes, a call that takes seconds.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tests.connector.fakes import FakeSpec, hash_tokens, make_config

from kvtier.base import OffloadKey
from kvtier.config import parse_settings as parse_connector_settings
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.errors import KVTierError
from kvtier.namespace import ABSENT, differences, parse_document
from kvtier.observe.control import EngineControl
from kvtier.observe.control_commands import COMMANDS
from kvtier.observe.control_wire import decode, encode
from kvtier.settings import parse_settings
from kvtier.sim.formats.registry import read_trace
from kvtier.tiering.base import parse_tier_settings
from kvtier.tiering.fs.notes import NotesState, WantNote, seal_notes
from kvtier.tiering.fs.pack_header import OwnerMark, PackGeometry, PackHeader
from kvtier.tiering.fs.purge_requests import NamedBlock, PurgeRequest, parse_requests
from kvtier.tiering.fs.records import (
    RECORD,
    RECORD_BYTES,
    Change,
    Kind,
    names_of,
    pack_changes,
    seal_records,
    whole_records,
)
from kvtier.tiering.fs.settings import PackSettings
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    MAX_KEY_BYTES,
    Envelope,
    HeaderCheck,
    check_block,
    make_header,
    unpack,
)
from kvtier.tiering.mooncake.settings import MooncakeSettings
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.valkey.resp import ProtocolError, ReplyReader, read_reply, read_value
from kvtier.tiering.valkey.settings import ValkeySettings

NAMESPACE = bytes(range(16))
KEY = OffloadKey(bytes(36))
PACK_DIGEST_BYTES = 16

MAX_MESSAGE_CHARS = 2000

DOCUMENT = json.dumps({"layout_version": 1, "model": {"dtype": "float16", "layers": [1, 2, 3]}})
SETTINGS_OF_TIER = {
    "fs": PackSettings,
    "obj": ObjSettings,
    "valkey": ValkeySettings,
    "mooncake": MooncakeSettings,
}


@dataclass(frozen=True)
class Parser:
    """A parser under test.

    Attributes:
        name: as the corpus' folder is called.
        feed: hands it some bytes; raises on a finding.
        seeds: bytes that it accepts, or nearly.
        words: what its input is made of, for a fuzzer's dictionary.
    """

    name: str
    feed: Callable[[bytes], None]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()


def feed_envelope(data: bytes) -> None:
    """Read a block's header and check the payload behind it, as they are and with the header's checksum made right."""
    header, payload = data[:ENVELOPE_BYTES], data[ENVELOPE_BYTES:]
    _read_envelope(header, payload)
    if len(header) == ENVELOPE_BYTES:
        fields = header[:-8]
        _read_envelope(fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little"), payload)


def _read_envelope(header: bytes, payload: bytes) -> None:
    found = unpack(header)
    asked = check_block(header, payload, KEY, NAMESPACE)
    if isinstance(found, Envelope):
        own = check_block(header, payload, found.key, found.namespace)
        if found.is_encrypted:
            assert own in (HeaderCheck.ENCRYPTED, HeaderCheck.OTHER_VERSION, HeaderCheck.OTHER_CODEC), own
        else:
            assert own in (HeaderCheck.OK, HeaderCheck.DAMAGED, HeaderCheck.OTHER_CODEC), own
        if asked is HeaderCheck.OK:
            assert (found.key, found.namespace, found.stored_bytes) == (KEY, NAMESPACE, len(payload))
    else:
        assert asked is not HeaderCheck.OK, found


def feed_pack(data: bytes) -> None:
    """Read the first two pages of a pack, as they are and with the digest made right.

    A page that is accepted has the bytes that are made of what it says, but for what nothing is kept in.
    """
    kinds: tuple[type[PackHeader | OwnerMark], ...] = (PackHeader, OwnerMark)
    for kind in kinds:
        length = len((PACK_HEADER if kind is PackHeader else OWNER_MARK).pack()) - PACK_DIGEST_BYTES
        fields = data[:length]
        digest = hashlib.blake2b(fields, digest_size=PACK_DIGEST_BYTES, usedforsecurity=False).digest()
        for page in (data, fields + digest):
            found = kind.unpack(page)
            if found is not None:
                assert kind.unpack(found.pack()) == found
            if isinstance(found, PackHeader):
                assert found.geometry.is_possible()


def feed_records(data: bytes) -> None:
    """Read a journal, as it is and with the records' checksums made right."""
    whole = np.frombuffer(data, RECORD, count=len(data) // RECORD_BYTES)
    for journal in (data, seal_records(whole, PACK_HEADER.pack_id)):
        records, num_read = whole_records(journal, PACK_HEADER.pack_id, PACK_HEADER.geometry.num_slots)
        assert len(records) <= num_read <= len(whole)
        assert all(slot < PACK_HEADER.geometry.num_slots for slot in records["slot"].tolist())
        assert all(len(name) <= MAX_KEY_BYTES for name in names_of(records))
        again = seal_records(records, PACK_HEADER.pack_id)
        assert whole_records(again, PACK_HEADER.pack_id, PACK_HEADER.geometry.num_slots)[1] == len(records)


def feed_notes(data: bytes) -> None:
    """Read the notes of another process, as they are and as JSON behind the right checksum; and a list of purges."""
    for page in (data, seal_notes(data)):
        found = NotesState.unpack(page)
        if found is not None:
            assert NotesState.unpack(found.pack()) == found
    for request in parse_requests(data):
        assert parse_requests(json.dumps([request]).encode()) == [request]


def feed_document(data: bytes) -> None:
    """Read a namespace's document and compare it with another one and with itself."""
    text = data.decode("utf-8", "replace")
    try:
        parse_document(text)
        assert not differences(text, text) or "NaN" in text, "a document differs from itself"
        found = differences(text, DOCUMENT)
    except KVTierError:
        return
    assert all(one.value_a != one.value_b or one.value_a == ABSENT for one in found) or found


class Wire:
    """A socket that hands out prepared bytes, a few at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._data, self._step = memoryview(data), step

    def recv_into(self, target: memoryview, num_bytes: int = 0, flags: int = 0) -> int:
        """Fill ``target`` with what is left, at most ``step`` bytes; 0 at the end."""
        del flags
        length = min(num_bytes or len(target), len(target), self._step, len(self._data))
        target[:length] = self._data[:length]
        self._data = self._data[length:]
        return length


def feed_reply(data: bytes) -> None:
    """Read replies of a server: the first byte says how the rest is cut; a row is filled whole or is no value."""
    step, replies = 1 + data[0] % 64 if data else 1, data[1:]
    wire: Any = Wire(replies, step)  # Any: it stands in for a socket
    reader = ReplyReader(wire)
    header, row = bytearray(8), bytearray(32)
    try:
        reply = read_value(reader, memoryview(header), memoryview(row))
        if reply.kind == "$" and reply.number == len(header) + len(row):
            assert bytes(header + row) in replies, "the row is not what was sent"
        while True:
            read_reply(reader)
    except ProtocolError:
        return


def feed_trace(data: bytes) -> None:
    """Read a trace: the first byte says in which format, 0 to find out."""
    names = (None, "mooncake", "qwen_bailian", "kvtier", "kv_events")
    name = names[data[0] % len(names)] if data else None
    with tempfile.NamedTemporaryFile(dir=_quick_folder()) as file:
        file.write(data[1:])
        file.flush()
        try:
            trace = read_trace(Path(file.name), name)
        except KVTierError:
            return
    assert trace.requests, "a trace without a request is refused"


def feed_settings(data: bytes) -> None:
    """Read the settings of the connector and of its tiers from JSON."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(values, dict):
        return
    _expect_own_error(partial(parse_connector_settings, values))
    for tier in _tiers_in(values):
        kind = SETTINGS_OF_TIER.get(str(tier.get("type")))
        own = {name: value for name, value in tier.items() if name != "type"}
        if kind is None:
            _expect_own_error(partial(parse_tier_settings, own))
        else:
            _expect_own_error(partial(parse_settings, kind, own))


def feed_control(data: bytes) -> None:
    """Read lines of the control socket, begin what each asks for, and end the engine's step behind it."""
    for control, _ in _list_engines():
        for line in data.split(b"\n"):
            error = ""
            try:
                ask = control.begin(decode(line))
                control.on_step_end()
                reply = ask.poll()
                ask.cancel()
                control.on_step_end()
                encode(reply or {})
            except KVTierError as refusal:
                error = str(refusal)
            assert len(error) < MAX_MESSAGE_CHARS, "a value was not cut"
            encode({"ok": False, "error": error})
            assert not control.has_commands, "a command whose client is gone goes on"


@cache
def _list_engines() -> Sequence[tuple[EngineControl, OffloadingConnectorScheduler]]:
    """Return an engine without tenants and one with them and an audit, and the controls of both."""
    return [_make_engine(), _make_engine(tenants={"team": {"quota_bytes": "1MiB"}, "*": {}}, audit_ratio=0.5)]


def _make_engine(**settings: object) -> tuple[EngineControl, OffloadingConnectorScheduler]:
    config = replace(make_config(), extra_config=settings)
    control = EngineControl(config, hash_tokens)
    return control, OffloadingConnectorScheduler(FakeSpec(config), control=control)


def _expect_own_error(parse: Callable[[], object]) -> None:
    message = ""
    try:
        parse()
    except KVTierError as error:
        message = str(error)
    assert len(message) < MAX_MESSAGE_CHARS, "a value was not cut"


def _tiers_in(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    tiers = values.get("secondary_tiers", [])
    return [tier for tier in tiers if isinstance(tier, dict)] if isinstance(tiers, list) else []


def _quick_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  # a file of its own name, gone at once


PAYLOAD = b"payload of a block"
MOONCAKE_LINE = b'{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}\n'
QWEN_LINE = (
    b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 32, "output_length": 4, "type": "text", '
    b'"turn": 1, "hash_ids": [7, 8]}\n'
)
CONTROL_LINES = [
    b'{"do": "hello"}',
    b'{"do": "stats"}\n{"do": "resume"}',
    b'{"do": "recent", "n": 10}',
    b'{"do": "drain", "timeout_s": 2.5}',
    b'{"do": "pin", "token_ids": [1, 2, 3, 4, 5], "lease_s": 5, "tenant": "team"}',
    b'{"do": "unpin", "all": true}\n{"do": "unpin", "token_ids": [1, 2, 3, 4]}',
    b'{"do": "prefetch", "token_ids": [1, 2, 3, 4], "timeout_s": 1}',
    b'{"do": "purge", "all": true}',
    b'{"do": "purge", "tiers": ["fs", "host"], "tenant": "team"}',
]
PACK_HEADER = PackHeader(PackGeometry(4096, 10), bytes(range(16)), NAMESPACE)
OWNER_MARK = OwnerMark(bytes(16), "12x9f", bytes(range(16)), is_closed=True)
CHANGES = [Change(Kind.STORED, 3, KEY, 5, 6), Change(Kind.DROPPED, 3, b"")]
NOTES = NotesState(
    NAMESPACE.hex(), 2**30, 5.5, WantNote(NAMESPACE.hex(), 1.5, None), ((NAMESPACE.hex(), 3),), ("0" * 16,)
)
PURGES = [PurgeRequest("0" * 16, NAMESPACE.hex(), 3, 5.5, (NamedBlock(NAMESPACE.hex(), 3, KEY.hex()),))]
FS_TIER = b'{"type": "fs", "root_dir": "/x", "capacity_bytes": 1}'

PARSERS = {
    one.name: one
    for one in (
        Parser("envelope", feed_envelope, [make_header(KEY, NAMESPACE, PAYLOAD) + PAYLOAD], [b"KVTB"]),
        Parser("pack", feed_pack, [PACK_HEADER.pack(), OWNER_MARK.pack()], [b"kvtier-pack", b"kvtier-owner"]),
        Parser("records", feed_records, [pack_changes(CHANGES, PACK_HEADER.pack_id)]),
        Parser(
            "notes",
            feed_notes,
            [NOTES.pack().rstrip(b"\0"), NOTES.pack()[28:].rstrip(b"\0"), json.dumps(PURGES).encode()],
            [b'"version":1', b'"damaged":[[', b'"wants":[', b"1e999"],
        ),
        Parser("document", feed_document, [DOCUMENT.encode()], [b"layout_version", b"tenant_salt", b"epoch"]),
        Parser(
            "reply",
            feed_reply,
            [b"\x07+OK\r\n", b"\x01$40\r\n" + bytes(40) + b"\r\n:1\r\n", b"\x20-MOVED 1 a:2\r\n$-1\r\n"],
            [b"\r\n", b"$-1", b"-ASK ", b"*2"],
        ),
        Parser(
            "trace",
            feed_trace,
            [b"\x00" + MOONCAKE_LINE, b"\x03" + QWEN_LINE, b"\x00" + QWEN_LINE],
            [b"hash_ids"],
        ),
        Parser(
            "settings",
            feed_settings,
            [b'{"cpu_bytes_to_use": "8GiB", "secondary_tiers": [' + FS_TIER + b"]}"],
            [b"GiB", b'"type"', b"secondary_tiers", b"valkey", b"pack_bytes", b"1e999"],
        ),
        Parser(
            "control",
            feed_control,
            CONTROL_LINES,
            [
                b'"all": true',
                b'"do": ',
                b'"lease_s": ',
                b'"tenant": "team"',
                b'"token_ids": [',
                b'"tiers": [',
                b"1e999",
            ]
            + [f'"{name}"'.encode() for name in COMMANDS],
        ),
    )
}
