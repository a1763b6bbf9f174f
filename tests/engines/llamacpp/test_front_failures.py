"""What goes wrong around the front costs hits and never an answer: ends of the server, damage, other clients."""

import os
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from tests.engines.llamacpp import tiny_models
from tests.engines.llamacpp.running import (
    Client,
    RunningFront,
    find_port,
    require_llama_server,
    start_server,
)
from tests.engines.llamacpp.slots import make_tokens

require_llama_server()

pytestmark = pytest.mark.slow

PROMPT = make_tokens(300)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.fixture
def attached(tmp_path: Path, llama: Path) -> Iterator[tuple[RunningFront, Client, Path]]:
    """A server of its own, and a front that found it."""
    slots = tmp_path / "slots"
    slots.mkdir()
    port = find_port()
    arguments = ["-m", str(llama), "--port", str(port), "--slot-save-path", f"{slots}/", "--cache-ram", "0"]
    server = start_server(tmp_path, [*arguments, "-np", "2", "-c", "4096"])
    front = RunningFront(tmp_path, [], ["--attach", f"http://127.0.0.1:{port}"])
    yield front, Client(port), slots
    front.close()
    server.kill()
    server.wait()


def test_a_server_that_is_killed_comes_back_with_its_conversations(tmp_path: Path, llama: Path) -> None:
    front = RunningFront(tmp_path, ["-m", str(llama)])
    first = front.complete(PROMPT)
    turn = [*PROMPT, *first.tokens, 5, 6]
    # Its idle slot is saved, and then it dies.
    front.wait_for(lambda: bool(list((tmp_path / "store").rglob("*.pack"))))
    os.kill(find_server(front), signal.SIGKILL)
    front.wait_for(lambda: "is started again" in front.log)
    front.wait_started(2)
    assert front.complete(turn).num_reused >= 256
    assert "Traceback" not in front.close()


def find_server(front: RunningFront) -> int:
    """Return the process that the front has started."""
    children = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children").read_text().split()
    return int(children[0])


def test_damaged_blocks_give_the_answer_of_a_cold_server(tmp_path: Path, llama: Path) -> None:
    front = RunningFront(tmp_path, ["-m", str(llama)])
    cold = front.complete(PROMPT)
    front.close()
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            data = bytearray(path.read_bytes())
            for at in range(60, len(data), 1000):
                data[at] ^= 0x55
            path.write_bytes(data)
    again = RunningFront(tmp_path, ["-m", str(llama)])
    found = again.complete(PROMPT)
    assert found.tokens == cold.tokens
    assert found.difference(cold) < 0.05
    assert "Traceback" not in again.close()


def test_an_attached_server_is_read_from_proc_and_served(attached: tuple[RunningFront, Client, Path]) -> None:
    front, server, slots = attached
    assert front.is_keeping, front.log
    front.complete(PROMPT)
    front.wait_for(lambda: "other" not in front.log and not list(slots.glob("*.slot")))
    # A client goes past the front and takes both slots.
    for number in (0, 1):
        server.complete(make_tokens(40, seed=5 + number), id_slot=number)
    assert front.complete([*PROMPT, 9, 9]).num_reused in (0, *range(250, 302))
    assert "Traceback" not in front.log


def test_a_second_front_of_one_server_passes_everything_on(
    attached: tuple[RunningFront, Client, Path], tmp_path: Path
) -> None:
    _, server, _ = attached
    folder = tmp_path / "second"
    folder.mkdir()
    second = RunningFront(folder, [], ["--attach", f"http://127.0.0.1:{server.port}"])
    assert "another front of kvtier uses" in second.log
    assert second.complete(PROMPT).tokens
    second.close()


def test_another_model_behind_the_url_is_noticed(tmp_path: Path) -> None:
    models = [tiny_models.write_llama(tmp_path / f"{seed}.gguf", seed=seed) for seed in (0, 1)]
    slots = tmp_path / "slots"
    slots.mkdir()
    port = find_port()
    own = ["--port", str(port), "--slot-save-path", f"{slots}/", "--cache-ram", "0"]
    server = start_server(tmp_path, ["-m", str(models[0]), *own])
    front = RunningFront(tmp_path, [], ["--attach", f"http://127.0.0.1:{port}"])
    assert front.is_keeping, front.log
    front.complete(PROMPT)
    front.wait_for(lambda: bool(list((tmp_path / "store").rglob("*.pack"))))
    server.kill()
    server.wait()
    server = start_server(tmp_path, ["-m", str(models[1]), *own])
    front.wait_for(lambda: front.raw("/health")[1] == 200)
    answer = front.complete(PROMPT)
    assert answer.tokens == Client(port).complete(PROMPT, id_slot=0).tokens
    front.complete([*PROMPT, 8, 8])
    front.wait_started(2)
    assert front.complete(make_tokens(80, seed=50)).tokens
    front.close()
    server.kill()
    server.wait()


def test_a_client_that_goes_away_gives_its_slot_back(tmp_path: Path, llama: Path) -> None:
    front = RunningFront(tmp_path, ["-m", str(llama)])
    for _ in range(3):
        connection = HTTPConnection("127.0.0.1", front.port, timeout=60)
        body = '{"prompt": "%s", "n_predict": 3000, "ignore_eos": true, "stream": true}' % ("ab " * 60)
        connection.request("POST", "/completion", body)
        response = connection.getresponse()
        response.read(20)
        response.close()
        connection.close()
    assert front.complete(PROMPT).tokens
    assert "Traceback" not in front.close()


def test_many_clients_get_the_answers_of_the_server_alone(tmp_path: Path, llama: Path) -> None:
    front = RunningFront(tmp_path, ["-m", str(llama), "-np", "2", "-c", "4096"])
    prompts = [[*PROMPT[: 100 + 60 * (i % 2)], *make_tokens(20 + i, seed=i)] for i in range(6)]
    answers: dict[int, list[int]] = {}

    def run(index: int) -> None:
        for _ in range(3):
            answers[index] = front.complete(prompts[index]).tokens

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = [front.complete(prompt, lora=[]).tokens for prompt in prompts]
    assert [answers[index] for index in range(len(prompts))] == alone
    assert "Traceback" not in front.close()


@pytest.mark.parametrize("kind", ["lfm2 with windows", "no slot path"])
def test_what_cannot_be_kept_is_served_and_one_line_says_why(tmp_path: Path, llama: Path, kind: str) -> None:
    if kind == "lfm2 with windows":
        model = tiny_models.write_lfm2(tmp_path / "windows.gguf", window_tokens=64)
        front = RunningFront(tmp_path, ["-m", str(model)])
    else:
        port = find_port()
        server = start_server(tmp_path, ["-m", str(llama), "--port", str(port)])
        front = RunningFront(tmp_path, [], ["--attach", f"http://127.0.0.1:{port}"])
    assert "keeps nothing and passes every request on" in front.log
    assert front.complete(PROMPT).tokens
    front.close()
    if kind != "lfm2 with windows":
        server.kill()
        server.wait()
