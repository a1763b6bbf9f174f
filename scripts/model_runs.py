"""Runs one model under one engine for ``scripts.model_table``: without kvtier, with it, and after a restart."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.e2e.vllm.checkpoints import save_deepseek, save_llama
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineFailedError, EngineProcess
from tests.e2e.vllm.families import FAMILIES, save_family
from tests.e2e.vllm.family_trial import BLOCK_TOKENS, find_reason
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.recurrent import ARGUMENTS
from transformers import AutoModelForCausalLM

from benchmarks.vllm.floor import Floor
from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.engines.transformers.block_sizes import choose_block_sizes
from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.engines.transformers.trial import NUM_NEW_TOKENS, generate_plainly
from kvtier.errors import KVTierError
from scripts.model_table import COMPUTED, DEVICE, FS, HOST, ORIGINS, Row

GREEDY = {"temperature": 0.0, "max_tokens": NUM_NEW_TOKENS}
NUM_COPIES = 5
HOST_BYTES = "768MiB"
MORE_TOKENS = 64
"""Room behind the longest prompt, for an answer."""
HYBRIDS = ("qwen3-next", "falcon-h1", "granite-4", "nemotron-h", "lfm2")
LATENT, DENSE = "deepseek-v2", "llama"
DENSE_BLOCK_TOKENS, LATENT_BLOCK_TOKENS = 64, 16

MODELS: Mapping[str, Callable[[Path], Path]] = {
    DENSE: save_llama,
    LATENT: save_deepseek,
    **{name: partial(save_family, FAMILIES[name]) for name in HYBRIDS},
}
"""What saves each model, by its name."""

Answer = tuple[int, ...]
Reply = tuple[float, Answer, Mapping[str, int]]
"""Seconds to the first token, the tokens, and the prompt's tokens that were found, by origin."""

Ask = Callable[[Sequence[int], bool], Reply]
"""Answers a prompt, after the device has forgotten everything where the second argument is true."""


class Record:
    """What came of the prompts of one length, the first of which warms the engine.

    Args:
        prompts: the prompts.
        computed: their answers without kvtier.
        again: those of the engine's own hits on the device, where they are known.
        num_found: tokens of a prompt that can be found.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        computed: Sequence[Answer],
        again: Sequence[Answer],
        num_found: int,
    ) -> None:
        self.prompts, self.num_found = prompts, num_found
        self._computed, self._again = computed, again
        self.times_s: dict[str, list[float]] = {origin: [] for origin in ORIGINS}
        self.equal = dict.fromkeys(ORIGINS, True)
        self.is_exact = True
        self.problems: list[str] = []

    def ask(self, ask: Ask, number: int, origin: str) -> None:
        """Ask for one prompt, which has to come from ``origin``."""
        took_s, answer, sources = ask(self.prompts[number], origin in (HOST, FS))
        expected = {} if origin == COMPUTED else {origin: self.num_found}
        if dict(sources) != expected:
            self.problems.append(f"{origin}: found {dict(sources)}, not {expected}")
        is_exact = answer == self._computed[number]
        if not is_exact:
            self.is_exact = self.is_exact and origin == COMPUTED
            is_equal = origin != COMPUTED and answer == self._again[number]
            self.equal[origin] = self.equal[origin] and is_equal
        if number:
            self.times_s[origin].append(took_s)

    def facts(self) -> dict[str, Any]:  # Any: fields of a row
        """Return what a row needs of it."""
        return {
            "found_tokens": self.num_found,
            "times_s": self.times_s,
            "equal": self.equal,
            "is_exact": self.is_exact,
            "problems": tuple(dict.fromkeys(self.problems)),
        }


def run_model(name: str, engine: str, lengths: Sequence[int], num_tries: int, folder: Path) -> list[Row]:
    """Return a row for each length; only hybrids have more than the first."""
    if name not in HYBRIDS:
        lengths = lengths[:1]
    if name == LATENT:
        # vLLM on a CPU computes one token behind latents that are held, and no more.
        lengths = [length // LATENT_BLOCK_TOKENS * LATENT_BLOCK_TOKENS + 1 for length in lengths]
    model = MODELS[name](folder / "model")
    prompts = {
        length: [make_prompt(1000 * length + number, length) for number in range(num_tries + 1)]
        for length in lengths
    }
    try:
        return ENGINES[engine](name, model, prompts, folder)
    except EngineFailedError as error:
        return [Row(name, engine, lengths[0], find_reason(str(error)))]
    except KVTierError as error:
        return [Row(name, engine, lengths[0], str(error))]


def settings_of(folder: Path) -> dict[str, Any]:  # Any: a user's JSON
    """Return kvtier's settings: host memory for every prompt, with files behind it."""
    tier = {"type": FS, "root_dir": str(folder / "blocks"), "capacity_bytes": "8GiB", "required": True}
    return {"cpu_bytes_to_use": HOST_BYTES, "secondary_tiers": [tier]}


def time_copy(num_bytes: int, folder: Path) -> float:
    """Return the median seconds of a plain copy of so many bytes."""
    folder.mkdir(exist_ok=True)
    with Floor(1, num_bytes, folder) as floor:
        return statistics.median(floor.copy_s() for _ in range(NUM_COPIES))


def bytes_of(
    token_bytes: float, state_bytes: int, interval: int, record: Record, folder: Path
) -> dict[str, Any]:
    """Return what a row says of bytes, with the time of a plain copy."""
    moved_bytes = int(token_bytes * record.num_found) + state_bytes
    return {
        "token_bytes": token_bytes,
        "state_bytes": state_bytes,
        "interval_tokens": interval,
        "moved_bytes": moved_bytes,
        "copy_s": time_copy(moved_bytes, folder / "copy"),
    }


def run_vllm(name: str, model: Path, prompts: Mapping[int, list[list[int]]], folder: Path) -> list[Row]:
    """Run a model under vLLM: an engine without kvtier, one with it, and one after a restart."""
    arguments: dict[str, Any] = {
        "max_model_len": max(prompts) + MORE_TOKENS,
        "enable_prefix_caching": True,
    }  # Any: vLLM's own
    if name == LATENT:
        arguments |= {"block_size": LATENT_BLOCK_TOKENS, "max_num_batched_tokens": max(prompts) + MORE_TOKENS}
    elif name == DENSE:
        arguments["block_size"] = DENSE_BLOCK_TOKENS
    else:
        arguments |= {**ARGUMENTS, "block_size": BLOCK_TOKENS}

    def start(settings: dict[str, Any] | None) -> EngineProcess:  # Any: a user's JSON
        options = EngineOptions(
            str(model), settings, 300, engine_arguments=arguments, keeps_prefix_caching=name == LATENT
        )
        return EngineProcess(options)

    plain: dict[int, list[list[Answer]]] = {}
    with start(None) as engine:
        for length, some in prompts.items():
            both = [engine.call("generate_in_turn", [one, one], GREEDY) for one in some]
            plain[length] = [[answer.tokens for answer in pair] for pair in both]

    def asking(engine: EngineProcess) -> Ask:
        def ask(prompt: Sequence[int], forgets_device: bool) -> Reply:  # a part of Ask
            took_s, answer, sources = engine.call("first_token", prompt, GREEDY, forgets_device)
            renamed = {HOST if one == "CPU" else one: number for one, number in sources.items()}
            return took_s, answer.tokens, renamed

        return ask

    records: dict[int, Record] = {}
    with start(settings_of(folder)) as engine:
        groups: list[tuple[int, int, bool]] = engine.call("kv_groups")
        block_tokens = max(one for one, _, _ in groups)
        for length, some in prompts.items():
            computed, again = zip(*plain[length], strict=True)
            records[length] = Record(some, computed, again, (length - 1) // block_tokens * block_tokens)
            answer_three_times(records[length], asking(engine))
    with start(settings_of(folder)) as engine:
        answer_from_files(records, asking(engine))
    token_bytes = sum(size / tokens for tokens, size, is_state in groups if not is_state)
    states = [size for _, size, is_state in groups if is_state]
    interval = block_tokens if states else 0
    return [
        Row(
            name,
            "vllm",
            length,
            **record.facts(),
            **bytes_of(token_bytes, sum(states), interval, record, folder),
        )
        for length, record in records.items()
    ]


def run_transformers(
    name: str, path: Path, prompts: Mapping[int, list[list[int]]], folder: Path
) -> list[Row]:
    """Run a model under the embedded engine; a restart is a new engine in this process."""
    torch.set_num_threads(1)  # tiny matrices gain nothing from a second thread
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    shape = ModelAdapter(model).shape
    sizes = choose_block_sizes(EngineConfig(1), shape)
    unit = sizes.state_interval_tokens or sizes.block_size_tokens
    num_blocks = 2 * (max(prompts) // sizes.block_size_tokens + 64)
    config = EngineConfig(num_blocks, extra_config=settings_of(folder))

    def asking(engine: KVTierEngine) -> Ask:
        def ask(prompt: Sequence[int], forgets_device: bool) -> Reply:  # a part of Ask
            if forgets_device:
                engine.drop_device_cache()
            result = engine.run(list(prompt), NUM_NEW_TOKENS)
            engine.drain(60.0)
            sources = {origin: number for origin, number in result.sources.items() if origin != COMPUTED}
            return result.time_to_first_token_s, tuple(result.tokens), sources

        return ask

    records: dict[int, Record] = {}
    with KVTierEngine(model, config) as engine:
        for length, some in prompts.items():
            plain = [tuple(generate_plainly(model, prompt)) for prompt in some]
            # Without states a prompt of whole blocks is found but for its last token.
            num_found = length - 1 if not shape.states and length % unit == 0 else (length - 1) // unit * unit
            records[length] = Record(some, plain, plain, num_found)
            answer_three_times(records[length], asking(engine))
    with KVTierEngine(model, config) as engine:
        answer_from_files(records, asking(engine))
    interval = sizes.state_interval_tokens or 0
    return [
        Row(
            name,
            "transformers",
            length,
            **record.facts(),
            **bytes_of(shape.token_bytes, shape.state_bytes, interval, record, folder),
        )
        for length, record in records.items()
    ]


def answer_three_times(record: Record, ask: Ask) -> None:
    """Ask for each prompt computed and from the device, then for each from host memory."""
    for number in range(len(record.prompts)):
        record.ask(ask, number, COMPUTED)
        record.ask(ask, number, DEVICE)
    for number in range(len(record.prompts)):
        record.ask(ask, number, HOST)


def answer_from_files(records: Mapping[int, Record], ask: Ask) -> None:
    """Ask a new engine for each prompt."""
    for record in records.values():
        for number in range(len(record.prompts)):
            record.ask(ask, number, FS)


ENGINES: Mapping[str, Callable[[str, Path, Mapping[int, list[list[int]]], Path], list[Row]]] = {
    "vllm": run_vllm,
    "transformers": run_transformers,
}
"""What runs a model under each engine."""
