"""Time to first token of the embedded engine, by where the prompt comes from, against a copy of its bytes.

One engine, one prompt a prefix length. In each round the same prompt is answered from the device's prefix cache,
from host memory, from the fs tier with its page cache warm (``--fs``), and computed; the sources of every prompt
token are asserted. The floor is a plain copy of the same bytes in the same round, and for fs a plain read of
files of the same size too. The bars: host at most device + 1.5 x copy + 10 ms; fs at most
device + 1.5 x (copy + read) + 20 ms. Medians of the rounds.

    python -m benchmarks.engine --quick
    python -m benchmarks.engine --fs --json engine.json
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.engines.transformers.model_adapter import ModelAdapter

BLOCK_SIZE_TOKENS = 16
PREFIX_TOKENS = (512, 1024, 2048, 4096)
QUICK_PREFIX_TOKENS = (512, 1024)
NUM_ROUNDS = 7
NUM_QUICK_ROUNDS = 3
TAIL_TOKENS = 5
"""Tokens after the prefix, so that each hit computes the same few."""

COPY_FACTOR = 1.5
HOST_SLACK_S = 0.010
FS_SLACK_S = 0.020
DRAIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one prefix length.

    Attributes:
        prefix_tokens: full blocks of the prompt, in tokens.
        prefix_bytes: their keys and values.
        device_s: time to first token, prefix on the device.
        host_s: the same, prefix in host memory.
        fs_s: the same, prefix in the fs tier; None when not measured.
        computed_s: the same, nothing cached.
        copy_s: a plain copy of the prefix's bytes.
        read_s: a plain read of as many bytes from a file; None when not measured.
    """

    prefix_tokens: int
    prefix_bytes: int
    device_s: float
    host_s: float
    fs_s: float | None
    computed_s: float
    copy_s: float
    read_s: float | None

    @property
    def host_bar_s(self) -> float:
        """The bar for a hit in host memory."""
        return self.device_s + COPY_FACTOR * self.copy_s + HOST_SLACK_S

    @property
    def fs_bar_s(self) -> float:
        """The bar for a hit in the fs tier."""
        return self.device_s + COPY_FACTOR * (self.copy_s + (self.read_s or 0.0)) + FS_SLACK_S


class Bench:
    """An engine and the ways to put a prompt into one place.

    Args:
        model: what is served.
        prefix_tokens: the longest prefix.
        fs_dir: directory of the fs tier; None leaves it out.
    """

    def __init__(self, model: LlamaForCausalLM, prefix_tokens: int, fs_dir: str | None) -> None:
        self.token_bytes = ModelAdapter(model).shape.token_bytes
        self.fs_dir = fs_dir
        self._model = model
        self._num_blocks = 2 * (prefix_tokens // BLOCK_SIZE_TOKENS + 2)
        # Roomy on purpose: a declined cascade would be measured as a recomputation.
        room = {"capacity_bytes": "16GiB", "max_in_flight_store_bytes": "16GiB"}
        # The bar is for a warm page cache, which direct I/O goes past.
        self._tiers = [{"type": "fs", "root_dir": fs_dir, "direct_io": False} | room] if fs_dir else []

    def open(self) -> KVTierEngine:
        """Return a new engine with an empty host tier; the fs tier keeps what it has."""
        row_bytes = -(-self.token_bytes * BLOCK_SIZE_TOKENS // 4096) * 4096
        extra = {"cpu_bytes_to_use": self._num_blocks * row_bytes}
        config = EngineConfig(
            num_device_blocks=self._num_blocks,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            extra_config=extra | ({"secondary_tiers": self._tiers} if self._tiers else {}),
            model_revision="benchmark",
        )
        return KVTierEngine(self._model, config)

    def time_to_first_token(self, engine: KVTierEngine, prompt: list[int], origin: str) -> float:
        """Answer one token and assert that the whole prefix came from ``origin``."""
        result = engine.run(prompt, 1)
        expected = {origin: len(prompt) - TAIL_TOKENS, "computed": TAIL_TOKENS}
        if origin == "computed":
            expected = {"computed": len(prompt)}
        if result.sources != expected:
            raise SystemExit(f"prompt came from {dict(result.sources)}, not {expected}")
        return result.time_to_first_token_s

    def measure(self, prefix_tokens: int, num_rounds: int) -> Row:
        """Measure one prefix length in rounds of all origins."""
        times: dict[str, list[float]] = {
            name: [] for name in ("computed", "device", "host", "fs", "copy", "read")
        }
        num_bytes = prefix_tokens * self.token_bytes
        for number in range(num_rounds + 1):
            prompt = make_prompt(prefix_tokens * 1000 + number, prefix_tokens + TAIL_TOKENS)
            seconds = self._measure_round(prompt, num_bytes)
            if number:
                for name, value in seconds.items():
                    times[name].append(value)
        medians = {name: statistics.median(values) for name, values in times.items() if values}
        return Row(
            prefix_tokens=prefix_tokens,
            prefix_bytes=num_bytes,
            device_s=medians["device"],
            host_s=medians["host"],
            fs_s=medians.get("fs"),
            computed_s=medians["computed"],
            copy_s=medians["copy"],
            read_s=medians.get("read"),
        )

    def _measure_round(self, prompt: list[int], num_bytes: int) -> dict[str, float]:
        seconds: dict[str, float] = {}
        with self.open() as engine:
            engine.run(make_prompt(1, len(prompt)), 1)
            seconds["computed"] = self.time_to_first_token(engine, prompt, "computed")
            engine.drain(DRAIN_S)
            seconds["device"] = self.time_to_first_token(engine, prompt, "device")
            engine.drop_device_cache()
            seconds["host"] = self.time_to_first_token(engine, prompt, "host")
            engine.drain(DRAIN_S)
        seconds["copy"] = time_of_copy(num_bytes)
        if self.fs_dir:
            with self.open() as engine:
                engine.run(make_prompt(2, len(prompt)), 1)
                engine.drain(DRAIN_S)
                seconds["fs"] = self.time_to_first_token(engine, prompt, "fs")
            seconds["read"] = time_of_read(Path(self.fs_dir), num_bytes)
        return seconds


def make_model(num_layers: int, hidden_size: int) -> LlamaForCausalLM:
    """Return a Llama of random weights with eight key-value heads for its sixteen."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config)


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, 4096, (num_tokens,), generator=generator).tolist()
    return tokens


def time_of_copy(num_bytes: int) -> float:
    """Return the median time of a plain copy of that many bytes between buffers that were touched before."""
    source, target = (torch.ones(num_bytes, dtype=torch.int8) for _ in range(2))
    return statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))


def time_of_read(folder: Path, num_bytes: int) -> float:
    """Return the median time of reading a file of that many bytes from the page cache."""
    target = bytearray(num_bytes)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(target)
        file.flush()

        def read() -> None:
            file.seek(0)
            file.readinto(target)

        return statistics.median(timed(read) for _ in range(3))


def timed(work: Callable[[], object]) -> float:
    """Return how long ``work`` took, in seconds."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def print_table(rows: list[Row]) -> None:
    """Print one line for each prefix length, times in ms."""
    names = ("tokens", "MiB", "computed", "device", "host", "host bar", "fs", "fs bar", "copy", "read")
    print(" ".join(f"{name:>9}" for name in names))
    for row in rows:
        fs_bar_s = None if row.fs_s is None else row.fs_bar_s
        times = (
            row.computed_s,
            row.device_s,
            row.host_s,
            row.host_bar_s,
            row.fs_s,
            fs_bar_s,
            row.copy_s,
            row.read_s,
        )
        cells = [f"{'-':>9}" if seconds is None else f"{1e3 * seconds:9.1f}" for seconds in times]
        print(f"{row.prefix_tokens:9d} {row.prefix_bytes / 2**20:9.1f} {' '.join(cells)}")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short prefixes, three rounds")
    parser.add_argument("--fs", action="store_true", help="measure the fs tier too")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0 takes its own choice")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args()
    lengths = QUICK_PREFIX_TOKENS if arguments.quick else PREFIX_TOKENS
    num_rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = make_model(arguments.layers, arguments.hidden)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        bench = Bench(model, max(lengths), folder if arguments.fs else None)
        rows = [bench.measure(length, num_rounds) for length in lengths]
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
