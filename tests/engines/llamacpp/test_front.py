"""The whole front before a real llama-server: what is found after a restart is what the server itself would reuse."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.llamacpp import tiny_models
from tests.engines.llamacpp.running import RunningFront, require_llama_server
from tests.engines.llamacpp.slots import make_tokens

from kvtier.cli.main import main
from kvtier.misses import RequestRecord
from kvtier.observe.control_client import EngineConnection, find_instances
from kvtier.observe.why import explain_records

require_llama_server()

WRITERS = {
    "llama": tiny_models.write_llama,
    "gemma": tiny_models.write_gemma,
    "lfm2": tiny_models.write_lfm2,
    "mamba": tiny_models.write_mamba,
}

PROMPT = make_tokens(300)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[RunningFront]:
    front = RunningFront(tmp_path_factory.mktemp("front"), ["-m", str(llama), "-np", "2", "-c", "4096"])
    yield front
    front.close()


def check_restart(folder: Path, model: Path, *arguments: str) -> None:
    """A conversation goes on after both were restarted, with the answer that the server alone gives."""
    front = RunningFront(folder, ["-m", str(model), *arguments])
    assert front.is_keeping, front.log
    first = front.complete(PROMPT)
    turn = [*PROMPT, *first.tokens, *make_tokens(20, seed=3)]
    own = front.complete(turn)
    # It is idle, and stored. What is stored at an end that follows at once is another question.
    front.wait_for(lambda: any(path.stat().st_size for path in folder.rglob("store/*/*.index")))
    log = front.close()
    assert "Traceback" not in log
    again = RunningFront(folder, ["-m", str(model), *arguments])
    found = again.complete(turn)
    log = again.close()
    assert "Traceback" not in log
    assert found.num_reused >= own.num_reused - 1, log
    assert found.tokens == own.tokens
    assert found.difference(own) < 0.01


def test_a_conversation_goes_on_after_a_restart(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_restart(tmp_path, llama)
    assert main(["inspect", str(tmp_path / "store"), "--json"]) == 0
    assert "llama.gguf" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "lfm2", "mamba"])
def test_every_kind_of_cache_goes_on_after_a_restart(tmp_path: Path, name: str) -> None:
    check_restart(tmp_path, WRITERS[name](tmp_path / f"{name}.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("-np", "4", "-c", "8192"),
        ("-np", "4", "-c", "8192", "-kvu"),
        ("-fa", "off"),
        ("-fa", "on"),
        ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"),
        ("-ctk", "bf16", "-ctv", "bf16"),
    ],
    ids=" ".join,
)
def test_every_layout_goes_on_after_a_restart(
    tmp_path: Path, llama: Path, arguments: tuple[str, ...]
) -> None:
    check_restart(tmp_path, llama, *arguments)


def test_the_answers_are_those_of_the_server_and_chats_share_their_beginning(front: RunningFront) -> None:
    assert front.is_keeping, front.log
    first = front.complete([*PROMPT, *make_tokens(9, seed=1)])
    assert first.num_reused == 0
    front.wait_for(lambda: front.call("/slots")[0]["is_processing"] is False)
    other = front.complete([*make_tokens(50, seed=8)])
    assert other.num_reused == 0
    shared = front.complete([*PROMPT, *make_tokens(9, seed=2)])
    assert shared.num_reused >= 256


def test_a_stream_is_passed_on_byte_for_byte(front: RunningFront) -> None:
    body = {"prompt": PROMPT[:40], "n_predict": 12, "temperature": 0, "stream": True, "ignore_eos": True}
    data, status = front.raw("/completion", body)
    assert status == 200
    events = [line for line in data.split(b"\n\n") if line.startswith(b"data: ")]
    assert len(events) > 6
    assert b'"stop":true' in events[-1]


def test_what_the_front_does_not_know_passes_through(front: RunningFront) -> None:
    assert front.call("/health")["status"] == "ok"
    assert front.call("/v1/models")["data"]
    assert front.call("/tokenize", {"content": "abc"})["tokens"]
    assert front.raw("/nothing/of/the/kind")[1] == 404
    assert front.raw("/completion", {"prompt": PROMPT[:9], "n_predict": 2, "id_slot": 1})[1] == 200
    assert front.raw("/v1/completions", {"prompt": "ab", "max_tokens": 2, "n": 2})[1] in (200, 400, 500)
    assert front.raw("/completion", {"prompt": {"wrong": 1}})[1] >= 400


def test_a_chat_by_text_finds_its_beginning_again(front: RunningFront) -> None:
    system = "You answer in one short sentence. " * 12
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "One?"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    assert front.call("/v1/chat/completions", body)["choices"]
    front.complete(make_tokens(60, seed=31))
    front.complete(make_tokens(60, seed=32))
    messages[1]["content"] = "Two?"
    timings = front.call("/v1/chat/completions", body)["timings"]
    assert timings["cache_n"] >= 300


def test_operators_see_the_front_as_an_engine(front: RunningFront) -> None:
    front.complete(make_tokens(150, seed=41))
    (instance,) = (one for one in find_instances() if one.description["pid"] == front.process.pid)
    assert instance.description["engine"] == "llamacpp"
    with EngineConnection(instance.path) as connection:
        numbers = connection.ask("stats")["stats"]
        sent = connection.ask("recent", n=50)["records"]
        assert connection.ask("drain", 30.0)["ok"]
    records = [RequestRecord.from_json(values) for values in sent]
    assert numbers["connector.recorded_requests"] >= len(records) > 0
    assert records[-1].num_prompt_tokens == 150
    assert explain_records(records).num_requests == len(records)


def test_a_request_with_an_adapter_leaves_nothing_behind(front: RunningFront) -> None:
    tokens = make_tokens(100, seed=77)
    front.complete(tokens, lora=[])
    again = front.complete(tokens)
    assert again.num_reused == 0
