"""What is llama.cpp's own, as docs/guide/llamacpp.md lists it: a test that fails says that a row there is gone."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.llamacpp import tiny_models
from tests.engines.llamacpp.running import Client, find_port, require_llama_server, start_server
from tests.engines.llamacpp.slots import make_tokens

require_llama_server()

pytestmark = pytest.mark.slow

PROMPT = make_tokens(200)


class Server(Client):
    """A llama-server without a front."""

    def __init__(self, folder: Path, model: Path, *arguments: str) -> None:
        super().__init__(find_port())
        self.slots = folder / "slots"
        self.slots.mkdir(exist_ok=True)
        own = ["-m", str(model), "--port", str(self.port), "--slot-save-path", f"{self.slots}/"]
        self.process: subprocess.Popen[bytes] = start_server(folder, [*own, *arguments])
        while not self.is_up():
            assert self.process.poll() is None

    def is_up(self) -> bool:
        try:
            return self.raw("/health")[1] == 200
        except OSError:
            return False


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_models.write_llama(tmp_path / "llama.gguf")


@pytest.fixture
def server(tmp_path: Path, llama: Path) -> Iterator[Server]:
    server = Server(tmp_path, llama, "-np", "2", "-c", "4096", "--cache-ram", "0")
    yield server
    server.process.kill()
    server.process.wait()


def test_a_save_writes_the_whole_slot_each_time(server: Server) -> None:
    sizes = []
    for num_tokens in (100, 200):
        server.complete(PROMPT[:num_tokens], id_slot=0)
        server.call("/slots/0?action=save", {"filename": "a.slot"})
        sizes.append((server.slots / "a.slot").stat().st_size)
    assert sizes[1] > 1.8 * sizes[0]


def test_a_file_that_is_cut_is_refused_and_the_server_lives(server: Server) -> None:
    """Builds before 11549 end here, so the front never asks for a file that is not whole."""
    server.complete(PROMPT, id_slot=0)
    server.call("/slots/0?action=save", {"filename": "a.slot"})
    path = server.slots / "a.slot"
    path.write_bytes(path.read_bytes()[:-1000])
    assert server.raw("/slots/1?action=restore", {"filename": "a.slot"})[1] == 400
    assert server.is_up()


def test_props_hide_what_the_cache_is(server: Server) -> None:
    text = str(server.call("/props"))
    assert "cache_type" not in text
    assert "flash_attn" not in text
    assert "swa_full" not in text


def test_a_request_empties_idle_slots_unless_that_is_switched_off(tmp_path: Path, llama: Path) -> None:
    server = Server(tmp_path, llama, "-np", "2", "-c", "4096", "-kvu")
    server.complete(PROMPT, id_slot=0)
    server.complete(PROMPT[:20], id_slot=1)
    held = {slot["id"]: slot["n_prompt_tokens"] for slot in server.call("/slots")}
    server.process.kill()
    server.process.wait()
    assert held[0] == 0


def test_a_restore_under_swa_full_gives_other_tokens(tmp_path: Path) -> None:
    model = tiny_models.write_gemma(tmp_path / "gemma.gguf")
    server = Server(tmp_path, model, "-np", "2", "-c", "4096", "--cache-ram", "0", "--swa-full")
    server.complete(PROMPT, id_slot=0)
    server.call("/slots/0?action=save", {"filename": "a.slot"})
    other = [*PROMPT[:180], *make_tokens(20, seed=4)]
    cold = server.complete(other, id_slot=1)
    server.call("/slots/1?action=erase", {})
    server.call("/slots/1?action=restore", {"filename": "a.slot"})
    found = server.complete(other, id_slot=1)
    server.process.kill()
    server.process.wait()
    assert found.num_reused > 0
    assert found.tokens != cold.tokens or found.difference(cold) > 0.05
