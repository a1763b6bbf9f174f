"""A secret in a setting or the environment comes out nowhere: no error, log, number, file or command shows it."""

import json
import logging
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np
import pytest

pytest.importorskip("redis", reason="the valkey tier needs redis-py: pip install 'kvtier[valkey]'")
pytest.importorskip("obstore", reason="the obj tier needs obstore: pip install 'kvtier[obj]'")

from tests.connector.fakes import FakeBlocks, FakeRequest, hash_tokens
from tests.observe.controlled import GUARD_S, Background
from tests.tiering.test_spec import make_config
from tests.tiering.valkey.scripted import ScriptedServer

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.cli.main import main
from kvtier.config import OffloadingConfig
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.step import StepOutput
from kvtier.errors import KVTierError
from kvtier.observe import serve_metrics
from kvtier.observe.control import EngineControl
from kvtier.observe.control_client import EngineConnection
from kvtier.observe.control_server import ControlServer
from kvtier.observe.control_wire import make_control_folder
from kvtier.testing.tier_suite import key_of, make_rows
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager, TierSettings
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.spec import TieringOffloadingSpec

pytestmark = pytest.mark.slow

MARK = "sesame0123456789"
"""The secret, wherever one may stand."""


class TellingTier(SecondaryTierManager):
    """A foreign tier that puts its key into everything it raises."""

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings,
        *,
        api_key: str = "",
        starts: bool = True,
    ) -> None:
        super().__init__(config, primary_kv_view, settings)
        self._key = api_key
        if not starts:
            self._tell()

    @staticmethod
    def get_tier_type() -> str:
        return "telling"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self._tell()

    def submit_store(self, job: JobMetadata) -> None:
        self._tell()

    def submit_load(self, job: JobMetadata) -> None:
        self._tell()

    def get_finished(self) -> Iterable[JobResult]:
        return []

    def check_reachable(self) -> None:
        self._tell()

    def drain_unanswered(self) -> int:
        self._tell()
        return 0

    def reset(self, epoch: bytes) -> None:
        self._tell()

    def _tell(self) -> bool:
        try:
            json.loads(self._key)
        except ValueError as error:
            raise RuntimeError(f"request with key {self._key!r} failed") from error
        return True


class Echo(BaseHTTPRequestHandler):
    """A store that repeats the request in its refusal."""

    def do_GET(self) -> None:
        """Refuse."""
        body = (
            f"<Error><Code>{MARK}</Code><Message>{self.headers} {self.path} {MARK}</Message></Error>".encode()
        )
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_HEAD = do_POST = do_GET  # noqa: N815  # the base class names them so

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
        """Say nothing."""


CONTROL_MESSAGES: tuple[dict[str, Any], ...] = (
    {"do": "hello"},
    {"do": "stats"},
    {"do": "recent"},
    {"do": "prefetch", "token_ids": list(range(40))},
    {"do": "pin", "token_ids": list(range(40))},
    {"do": "unpin", "all": True},
    {"do": "drain"},
    {"do": "purge"},
    {"do": "resume"},
    {"do": MARK[:1]},
)
"""What a client may ask an engine for, and what it may not."""

CONTROL_COMMANDS = (
    ["why"],
    ["why", "--json"],
    ["stats"],
    ["recent"],
    ["audit"],
    ["top", "--once"],
    ["drain", "--timeout", "5"],
)
"""Commands about a living engine."""


def ask(path: Path, message: dict[str, Any]) -> object:
    """Return the reply of an engine, or why there is none."""
    arguments = dict(message)
    try:
        with EngineConnection(path) as connection:
            return connection.ask(arguments.pop("do"), GUARD_S, **arguments)
    except KVTierError as error:
        return everything(error)


def beside(half: OffloadingConnectorScheduler, call: Callable[[], object]) -> object:
    """Make a client's call while the engine makes steps."""
    client = Background(call)
    while client.is_running:
        half.build_connector_meta(StepOutput())
    return client.join()


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Tiers whose settings and environment have the secret, and whose servers repeat it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "KVTIER_VALKEY_PASSWORD"):
        monkeypatch.setenv(name, MARK)
    valkey = ScriptedServer(lambda words: [b"-ERR " + b" ".join(words) + f" {MARK}\r\n".encode()])
    store = HTTPServer(("127.0.0.1", 0), Echo)
    Thread(target=store.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{store.server_port}"
    own = {"endpoint": endpoint, "allow_http": True, "region": "here", "timeout_s": 1.0}
    yield [
        {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "16MiB"},
        {"type": "valkey", "url": valkey.url.replace("//", f"//user:{MARK}@"), "timeout_s": 1.0},
        {"type": "valkey", "url": valkey.url.replace("//", f"//:{MARK}@"), "cluster": True, "timeout_s": 1.0},
        {"type": "obj", "url": "s3://bucket"} | own,
        {"type": f"{__name__}:TellingTier", "api_key": MARK},
        {"type": f"{__name__}:TellingTier", "api_key": MARK, "starts": False},
    ]
    valkey.close()
    store.shutdown()
    store.server_close()


def everything(error: BaseException) -> str:
    """Return what Python prints of an exception that nothing catches."""
    return "".join(traceback.format_exception(error)) + repr(error)


def test_through_a_start_failures_numbers_and_files(
    entries: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvtier")
    config = make_config(None, "secrets", secondary_tiers=entries, tenant_salt=MARK)
    spec = TieringOffloadingSpec(config)
    manager = spec.get_manager()
    request = ReqContext("a")
    for _ in range(3):
        manager.lookup(key_of(1), request)
        stored = manager.prepare_store([key_of(1), key_of(2)], request)
        if stored is not None and stored.keys_to_store:
            manager.complete_store(stored.keys_to_store, request)
        manager.end_step()
    said = [
        repr(one)
        for one in (config, config.settings, spec, manager, manager.stats(), list(manager.take_events()))
    ]
    spec.shutdown()

    lines = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert lines.count("telling") >= 2
    assert MARK not in lines
    assert MARK not in "".join(said)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "namespace.json" for path in files)
    assert not [path for path in files if MARK.encode() in path.read_bytes() or MARK in str(path)]


def test_through_the_control_socket_its_commands_and_the_metrics_page(
    entries: list[dict[str, Any]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'kvtier[observe]'")
    name = "secrets-live"
    config = make_config(None, name, secondary_tiers=entries, tenant_salt=MARK)
    spec = TieringOffloadingSpec(config)
    with TemporaryDirectory(prefix="kvtier-") as folder, monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)  # clients find the engine there, and none of others
        sockets = make_control_folder()
        control = EngineControl(config, hash_tokens)
        control.listen(lambda handler: ControlServer(sockets, name, handler))
        half = OffloadingConnectorScheduler(spec, control=control)
        for number in range(3):
            request = FakeRequest(f"{number}", list(range(40)), {"cache_salt": MARK})
            half.get_num_new_matched_tokens(request, 0)
            half.update_state_after_alloc(request, FakeBlocks(([0, 1, 2],)), 0)
            half.request_finished(request)
            half.build_connector_meta(StepOutput())
        with serve_metrics(half, 0) as server, urllib.request.urlopen(server.url) as page:  # noqa: S310 - our own
            said = [page.read().decode()]
        for message in CONTROL_MESSAGES:
            said += [repr(beside(half, partial(ask, sockets / f"{name}.sock", message)))]
        for words in CONTROL_COMMANDS:
            beside(half, partial(main, [words[0], name, *words[1:]]))
        beside(half, partial(main, ["ps"]))
        half.shutdown()
    spec.shutdown()

    found = capfd.readouterr()
    assert "kvtier_tier_breaker_open" in said[0]
    assert "120 prompt tokens" in found.out
    assert "telling" in found.out
    assert MARK not in found.out + found.err + "".join(said)


def test_where_the_tier_is_required(entries: list[dict[str, Any]]) -> None:
    for number, entry in enumerate(entries[1:]):
        name = f"secrets-required-{number}"
        spec = TieringOffloadingSpec(make_config(None, name, secondary_tiers=[entry | {"required": True}]))
        with pytest.raises(KVTierError) as refusal:
            spec.get_manager()
        assert MARK not in everything(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"url": f"redis://user:{MARK}@host:port"},
        {"url": f"redis://:{MARK}/x@host"},
        {"url": f"redis://user:{MARK}@host?a={MARK}"},
        {"url": [f"redis://user:{MARK}@host"]},
        {"type": "obj", "url": f"s3://user:{MARK}@bucket"},
        {"type": "obj", "url": f"https://host/bucket?X-Amz-Signature={MARK}"},
        {"type": "obj", "url": "s3://bucket", "endpoint": f"https://user:{MARK}@host"},
        {"type": "obj", "url": "s3://bucket", "endpoint": f"https://host/?sig={MARK}"},
        {"type": "obj", "url": "s3://bucket", "secret_access_key": MARK},
        {"no_such": f"redis://:{MARK}@host"},
        {f"redis://:{MARK}@host": 1},
        {"timeout_s": f"redis://:{MARK}@host"},
    ],
)
def test_settings_that_are_refused_do_not_repeat_it(change: dict[str, Any]) -> None:
    entry = {"type": "valkey", "url": f"redis://user:{MARK}@host"} | change
    with pytest.raises(KVTierError) as refusal:
        create_secondary_tier(entry, make_rows(), make_config(None, "refused"))
    assert MARK not in everything(refusal.value)


@pytest.mark.parametrize("is_json", [True, False])
def test_through_the_commands(
    entries: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str], is_json: bool
) -> None:
    config = tmp_path / "config.json"
    extra = {"cpu_bytes_to_use": "1MiB", "tenant_salt": MARK, "secondary_tiers": entries}
    config.write_text(json.dumps({"kv_connector": "KVTierConnector", "kv_connector_extra_config": extra}))
    main(["doctor", "--config", str(config), *(["--json"] if is_json else [])])
    for entry in entries:
        place = json.dumps({name: value for name, value in entry.items() if name != "starts"})
        for command in ("inspect", "verify"):
            main([command, place])
        main(["purge", place, "--dry-run", "--all"])
    main(["inspect", entries[1]["url"]])
    found = capfd.readouterr()
    assert "valkey" in found.out
    assert MARK not in found.out
    assert MARK not in found.err


def test_a_job_that_a_foreign_tier_fails_is_one_line_with_its_class(
    entries: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    view = make_rows()
    tier = create_secondary_tier(entries[4], view, make_config(None, "job"))
    job = JobMetadata(JobId(1), (key_of(1),), np.array([0]), False, ReqContext("a"))
    with pytest.raises(RuntimeError):
        tier.submit_store(job)
    assert MARK not in caplog.text
