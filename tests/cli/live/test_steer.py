"""``pin``, ``unpin``, ``prefetch``, ``drain`` and a purge of a living engine, as a user calls them."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.observe.controlled import GUARD_S, Engine
from tests.tiering.drivers import make_faulty_driver

from kvtier.cli.live.steer import purge_living, read_token_ids
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.errors import ConfigError
from kvtier.observe.control_client import EngineConnection
from kvtier.tiering.base import FAILURES_TO_OPEN

PROMPT = list(range(17))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def engine(runtime: Path) -> Iterator[Engine]:
    running = Engine(runtime, "serving", CPUOffloadingManager(40))
    running.store("a", PROMPT)
    yield running
    running.close()


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "prefix.json"
    path.write_text(json.dumps(PROMPT))
    return str(path)


@contextmanager
def stepping(engine: Engine) -> Iterator[None]:
    """Make steps on another thread, as an engine that serves."""
    has_ended = threading.Event()

    def step() -> None:
        while not has_ended.is_set():
            engine.step()
            time.sleep(0)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(GUARD_S)


@pytest.mark.parametrize("command", ["pin", "unpin", "prefetch"])
def test_what_an_engine_cannot_name_is_refused_with_a_clear_line(
    engine: Engine, tokens: str, run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "prompts of this engine have no cache salt and no adapter"
    for option, name in (("--salt", "cache_salt"), ("--adapter", "adapter")):
        status, _, err = run(command, "--tokens", tokens, option, "sesame")
        assert status == 2
        assert f"{name}: {line}" in err
        assert "sesame" not in err
    assert (
        "must be a tenant of the engine's setting" in run(command, "--tokens", tokens, "--tenant", "bob")[2]
    )
    monkeypatch.setenv("KVTIER_CACHE_SALT", "sesame")
    assert f"cache_salt: {line}" in run(command, "--tokens", tokens)[2]


def test_a_prefix_is_pinned_and_unpinned(engine: Engine, tokens: str, run: Run) -> None:
    with stepping(engine):
        status, out, _ = run("pin", "--tokens", tokens, "--lease", "60")
        assert status == 0
        assert out == (
            "serving: 4 blocks are pinned for 60 s, 4 of them are in host memory; 4 of at most 4 are pinned in all\n"
        )
        assert engine.manager.stats()["primary.leased_blocks"] == 4.0
        status, out, _ = run("unpin", "--all", "--json")
        assert (status, json.loads(out)) == (0, {"id": "serving", "num_blocks": 4})


def test_a_prefetch_says_how_much_there_is(engine: Engine, tokens: str, tmp_path: Path, run: Run) -> None:
    longer = tmp_path / "longer.json"
    longer.write_text(json.dumps([*PROMPT, 1, 2, 3]))
    with stepping(engine):
        assert run("prefetch", "--tokens", tokens)[1] == "serving: all 4 blocks are in host memory\n"
        assert run("prefetch", "serving", "--tokens", str(longer))[1].startswith("serving: 4 of 5 blocks are")


def test_a_drain_ends(engine: Engine, run: Run) -> None:
    with stepping(engine):
        assert run("drain")[:2] == (0, "serving: the tiers have what was pending\n")


def test_a_drain_says_what_was_lost_and_its_exit_status_is_1_until_the_next(runtime: Path, run: Run) -> None:
    driver, tier = make_faulty_driver(8)
    tier.faults.refuse_ratio = 1.0
    running = Engine(runtime, "serving", driver.manager)
    running.store("a", PROMPT)
    with stepping(running):
        status, out, _ = run("drain")
        assert status == 1
        assert out.startswith("serving: 4 blocks were lost on their way to a tier since the last drain: ")
        assert "WARNING" in out
        status, out, _ = run("drain", "--json")
        assert (status, json.loads(out)) == (
            0,
            {"id": "serving", "num_lost_blocks": 0, "num_pending_blocks": 0},
        )
    running.close()


def test_a_drain_says_what_waits_for_a_tier_that_is_left_out(runtime: Path, run: Run) -> None:
    driver, tier = make_faulty_driver(16)
    tier.faults.refuse_ratio = 1.0
    running = Engine(runtime, "serving", driver.manager)
    for number in range(FAILURES_TO_OPEN):
        running.store(str(number), [number] * 4)
    running.store("a", PROMPT[5:])
    with stepping(running):
        status, out, _ = run("drain")
        assert status == 1
        assert "5 blocks were lost" in out
        assert "3 blocks wait for a tier that is left out" in out
        assert run("drain")[0] == 1
    running.close()


def test_an_idle_engine_is_said_to_be_idle(engine: Engine, tokens: str, run: Run) -> None:
    status, _, err = run("pin", "--tokens", tokens, "--timeout", "0.05")

    assert status == 2
    assert "the engine made no step in 0.05 s" in err
    assert len(err.splitlines()) == 1


def test_a_purge_says_what_it_did_and_what_stays(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with stepping(engine):
        purge_living("serving", ["host"], is_all=False, timeout_s=GUARD_S, as_json=False)
        assert capsys.readouterr().out == "serving: 4 blocks of host are purged\n"
        purge_living(None, (), is_all=True, timeout_s=GUARD_S, as_json=True)
        assert json.loads(capsys.readouterr().out)["num_purged"] == {"host": 0}


def test_purge_takes_an_engine_in_place_of_a_place(engine: Engine, run: Run) -> None:
    with stepping(engine):
        status, out, _ = run("purge", "--instance", "serving", "--tier", "host")
        assert (status, out) == (0, "serving: 4 blocks of host are purged\n")
        assert json.loads(run("purge", "--instance", "serving", "--all", "--json")[1])["num_purged"] == {
            "host": 0
        }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either a place or --instance ID"),
        (("place", "--instance", "serving", "--all"), "give either a place or --instance ID"),
        (("--instance", "serving"), "say what to purge: --tier host, or --all"),
        (("--instance", "serving", "--older-than", "7d"), "other selectors need a PLACE"),
        (("place", "--tier", "host", "--all"), "goes with --instance"),
    ],
)
def test_a_purge_that_says_two_things_or_none_is_refused(
    engine: Engine, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    status, _, err = run("purge", *arguments)

    assert status == 2
    assert message in err
    assert engine.manager.stats()["primary.held_blocks"] == 4.0


def test_a_purge_without_a_selector_asks_for_all(engine: Engine) -> None:
    for tiers, is_all in (((), False), (("host",), True)):
        with pytest.raises(ConfigError, match="say what to purge: --tier host, or --all"):
            purge_living(None, tiers, is_all=is_all, timeout_s=1.0, as_json=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("garbage", "is no JSON"),
        ('{"a": 1}', "must hold a JSON list"),
        ("[1, true]", "must hold a JSON list"),
        ("[1.5]", "must hold a JSON list"),
    ],
)
def test_wrong_tokens_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prefix.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_token_ids(str(path), None, None)


def test_a_prefix_is_given_once(tokens: str, run: Run, runtime: Path) -> None:
    for arguments in ((), ("--tokens", tokens, "--text", tokens)):
        status, _, err = run("pin", *arguments)
        assert status == 2
        assert "give the prefix by --tokens FILE, or by --text FILE --tokenizer" in err
    assert "or --all" in run("unpin")[2]
    assert "--tokenizer: is needed for --text" in run("pin", "--text", tokens)[2]
    assert "cannot be read" in run("pin", "--tokens", str(runtime / "missing"))[2]


def test_a_text_is_tokenized_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'kvtier[transformers]'")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 5}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "prefix.txt").write_text("a b b a")

    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert read_token_ids(None, str(tmp_path / "prefix.txt"), place) == [3, 5, 5, 3]
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        read_token_ids(None, str(tmp_path / "prefix.txt"), tmp_path / "missing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be used"):
        read_token_ids(None, str(tmp_path / "prefix.txt"), tmp_path)


def test_a_resumed_audit_is_told_to_programs(
    run: Run, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    reply = {"ok": True, "id": "serving", "was_stopped": True}
    monkeypatch.setattr(EngineConnection, "ask", lambda *_, **__: reply)
    del engine

    status, out, _ = run("audit", "--resume", "--json")

    assert (status, json.loads(out)) == (0, {"id": "serving", "was_stopped": True})
