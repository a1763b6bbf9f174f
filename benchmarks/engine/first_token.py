"""Time to first token by the origin of the prompt, against a copy of its bytes.

There is one engine and one prompt per round. The same prompt is computed, then served from the device's prefix cache,
from host memory, and from the fs tier with its page cache warm; the origin of every prompt token is asserted. The floor
is a hit on the device plus a plain copy of the bytes, and for fs plus a plain read of a file of that size. "allowed" is
the bar: host at most device + 1.5 x copy + 10 ms, fs device + 1.5 x (copy + read) + 20 ms.

A hit in fs needs an engine without the prompt. It serves the prompt of the previous round first, also from fs: the
model's first pass over so many tokens touches memory that the other hits find touched already.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.engine.models import BLOCK_SIZE_TOKENS, make_model, make_prompt
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import timed
from benchmarks.harness.suite import Options
from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.engines.transformers.model_adapter import ModelAdapter

ROUNDS_OF_LENGTH = {256: 12, 512: 12, 1024: 9, 2048: 6, 4096: 4, 8192: 3}
"""Prefix in tokens -> measured rounds. Few of the long ones, because computing them takes the most time."""

QUICK_ROUNDS_OF_LENGTH = {512: 3, 1024: 3}
TAIL_TOKENS = 5
"""Tokens after the prefix, so that each hit computes the same few."""

NUM_HITS = 3
"""Hits per round on the device and in host memory; the round's value is their median. They take milliseconds, computing
takes seconds. A hit in fs needs its own engine and is measured once."""

LIGHT_KV_HEADS = 2
"""KV heads of a model with 4 KiB of KV per token, whose hits in host memory have their own bar."""

LIGHT_TOKENS, QUICK_LIGHT_TOKENS = 2048, 512
NUM_LIGHT_ROUNDS, NUM_QUICK_LIGHT_ROUNDS = 11, 3
MAX_LIGHT_RATIO = 1.15

COPY_FACTOR = 1.5
HOST_SLACK_S, FS_SLACK_S = 0.010, 0.020
COMPUTED, DEVICE, ALLOWED = "computed", "device", "allowed"
DRAIN_S = 120.0


class FirstTokens:
    """An engine, and ways to put a prompt into one place.

    Args:
        model: the model to serve.
        fs_dir: directory of the fs tier.
    """

    def __init__(self, model: LlamaForCausalLM, fs_dir: Path) -> None:
        self.token_bytes = ModelAdapter(model).shape.token_bytes
        self._fs_dir = fs_dir
        self._model = model
        self._last_prompts: dict[int, list[int]] = {}

    def measure_round(self, prefix_tokens: int, number: int) -> dict[str, float]:
        """Return seconds by origin, and those of a plain copy and a plain read of the same bytes.

        The first round of a length has no previous round, so its hit in fs must not be counted.
        """
        prompt = make_prompt(prefix_tokens * 1000 + number, prefix_tokens + TAIL_TOKENS)
        num_bytes = prefix_tokens * self.token_bytes
        seconds: dict[str, float] = {}
        with self._open(prefix_tokens) as engine:
            engine.run(make_prompt(1, BLOCK_SIZE_TOKENS), 1)
            seconds[COMPUTED] = first_token_s(engine, prompt, COMPUTED)
            engine.drain(DRAIN_S)
            seconds[DEVICE] = statistics.median(
                first_token_s(engine, prompt, DEVICE) for _ in range(NUM_HITS)
            )
            host_s = []
            for _ in range(NUM_HITS):
                engine.drop_device_cache()
                host_s.append(first_token_s(engine, prompt, "host"))
            seconds["host"] = statistics.median(host_s)
            engine.drain(DRAIN_S)
        with self._open(prefix_tokens) as engine:
            engine.run(make_prompt(2, BLOCK_SIZE_TOKENS), 1)
            engine.drain(DRAIN_S)
            if prefix_tokens in self._last_prompts:
                first_token_s(engine, self._last_prompts[prefix_tokens], "fs")
                engine.drain(DRAIN_S)
            seconds["fs"] = first_token_s(engine, prompt, "fs")
        self._last_prompts[prefix_tokens] = prompt
        return seconds | {"copy": copy_s(num_bytes), "read": read_s(self._fs_dir, num_bytes)}

    def _open(self, prefix_tokens: int) -> KVTierEngine:
        """Return a new engine with an empty host tier, with room for two prompts; the fs tier keeps its blocks."""
        num_blocks = 2 * (prefix_tokens // BLOCK_SIZE_TOKENS + 2)
        row_bytes = -(-self.token_bytes * BLOCK_SIZE_TOKENS // 4096) * 4096
        # Large on purpose: a declined cascade would be measured as a recomputation.
        room = {"capacity_bytes": "16GiB", "max_in_flight_store_bytes": "16GiB"}
        # The bar is for a warm page cache, which direct I/O bypasses.
        tier = {"type": "fs", "root_dir": str(self._fs_dir), "direct_io": False} | room
        extra = {"cpu_bytes_to_use": num_blocks * row_bytes, "secondary_tiers": [tier]}
        config = EngineConfig(
            num_device_blocks=num_blocks,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            extra_config=extra,
            model_revision="benchmark",
        )
        return KVTierEngine(self._model, config)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield times to first token by prefix length and origin; notes give the length from which a hit is faster."""
    rounds_of_length = QUICK_ROUNDS_OF_LENGTH if options.is_quick else ROUNDS_OF_LENGTH
    break_even: dict[str, int] = {}
    with options.new_folder() as folder:
        bench = FirstTokens(make_model(), folder)
        for prefix_tokens, num_rounds in rounds_of_length.items():
            bench.measure_round(prefix_tokens, 0)
            rounds = [bench.measure_round(prefix_tokens, 1 + number) for number in range(num_rounds)]
            for measurement in of_length(prefix_tokens, rounds):
                yield measurement
                ratio = measurement.ratio(COMPUTED)
                if ratio is not None and ratio.median > 1:
                    break_even.setdefault(str(measurement.labels["prompt from"]), prefix_tokens)
        yield measure_light(options, folder)
    for origin, prefix_tokens in break_even.items():
        options.note(
            f"a hit in {origin} is faster than computing from {prefix_tokens} tokens on, of those measured"
        )


def measure_light(options: Options, folder: Path) -> Measurement:
    """Return the time to first token in host memory against a hit on the device, with a model of little KV."""
    prefix_tokens = QUICK_LIGHT_TOKENS if options.is_quick else LIGHT_TOKENS
    num_rounds = NUM_QUICK_LIGHT_ROUNDS if options.is_quick else NUM_LIGHT_ROUNDS
    bench = FirstTokens(make_model(num_kv_heads=LIGHT_KV_HEADS), folder)
    rounds = [bench.measure_round(prefix_tokens, number) for number in range(1 + num_rounds)][1:]
    labels: dict[str, str | int] = {
        "prompt from": f"host, {bench.token_bytes >> 10} KiB a token",
        "tokens": prefix_tokens,
    }
    values = {
        OURS: tuple(1e3 * one["host"] for one in rounds),
        DEVICE: tuple(1e3 * one[DEVICE] for one in rounds),
        COMPUTED: tuple(1e3 * one[COMPUTED] for one in rounds),
    }
    return Measurement(labels, "ms", Better.LOWER, values, Bar(DEVICE, 1 / MAX_LIGHT_RATIO))


def of_length(prefix_tokens: int, rounds: list[dict[str, float]]) -> Iterator[Measurement]:
    """Yield the measurements of one length, for host and fs. Pure."""
    for origin, slack_s in (("host", HOST_SLACK_S), ("fs", FS_SLACK_S)):
        moved_s = [one["copy"] + (one["read"] if origin == "fs" else 0.0) for one in rounds]
        device_s = [one[DEVICE] for one in rounds]
        allowed_s = [
            base_s + COPY_FACTOR * more_s + slack_s for base_s, more_s in zip(device_s, moved_s, strict=True)
        ]
        values = {
            OURS: [one[origin] for one in rounds],
            FLOOR: [base_s + more_s for base_s, more_s in zip(device_s, moved_s, strict=True)],
            ALLOWED: allowed_s,
            DEVICE: device_s,
            COMPUTED: [one[COMPUTED] for one in rounds],
        }
        yield Measurement(
            {"prompt from": origin, "tokens": prefix_tokens},
            "ms",
            Better.LOWER,
            {name: tuple(1e3 * seconds for seconds in times) for name, times in values.items()},
            Bar(ALLOWED, 1.0),
        )


def first_token_s(engine: KVTierEngine, prompt: list[int], origin: str) -> float:
    """Generate one token and assert that the whole prefix came from ``origin``."""
    result = engine.run(prompt, 1)
    expected = {origin: len(prompt) - TAIL_TOKENS, COMPUTED: TAIL_TOKENS}
    if origin == COMPUTED:
        expected = {COMPUTED: len(prompt)}
    if result.sources != expected:
        raise SystemExit(f"the prompt came from {dict(result.sources)}, not {expected}")
    return result.time_to_first_token_s


def copy_s(num_bytes: int) -> float:
    """Return the median time of a plain copy of that many bytes between touched buffers."""
    source, target = (torch.ones(num_bytes, dtype=torch.int8) for _ in range(2))
    return statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))


def read_s(folder: Path, num_bytes: int) -> float:
    """Return the median time of reading a file of that many bytes from the page cache."""
    target = bytearray(num_bytes)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(target)
        file.flush()

        def read() -> None:
            file.seek(0)
            file.readinto(target)

        return statistics.median(timed(read) for _ in range(3))
