"""What whole engines do with vLLM's own connector and a tier behind it: cases that tests and a command share.

Each case starts engines of its own, serves prompts, and compares every answer with those of an engine without
offloading. A column is a tier and a policy: kvtier's, or vLLM's own for comparison.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.e2e.vllm import recurrent
from tests.e2e.vllm.answers import LOGPROB_TOLERANCE, Answer, largest_difference
from tests.e2e.vllm.checkpoints import COMMON, save_gemma, save_llama, save_qwen3_next
from tests.e2e.vllm.conftest import CONTROL_POOL_BLOCKS
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_pool import Alone, EnginePool, make_once
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_prompt
from tests.tiering.disks import small_disk_at

PROMPTS = [make_prompt(700 + seed) for seed in range(6)]

DEVICE_BLOCKS = 72
"""Holds two prompts and their answers."""

HOST = "16MiB"
"""Holds the blocks of four prompts of a Llama: the others come from the tier."""

Json = dict[str, Any]  # Any: a user's JSON


@dataclass(frozen=True, slots=True)
class Column:
    """A tier and a policy behind vLLM's own connector.

    Attributes:
        tier: the name of the tier, as a configuration has it.
        policy: the name of the policy.
        module: a library that the tier needs.
    """

    tier: str
    policy: str = "kvtier-lru"
    module: str = "xxhash"

    @property
    def title(self) -> str:
        """What the table calls it."""
        return f"{self.tier}, {self.policy}"

    @property
    def is_ours(self) -> bool:
        """Whether it is kvtier's."""
        return self.tier.startswith("kvtier")

    def entry(self, folder: Path) -> Json:
        """Return the tier's settings."""
        common = {"type": self.tier}
        if self.tier in ("fs", "kvtier-fs"):
            common["root_dir"] = str(folder)
        if self.tier == "kvtier-obj":
            common |= {"url": folder.as_uri()}
        return common | ({"capacity_bytes": "1GiB"} if self.tier in ("kvtier-fs", "kvtier-obj") else {})


COLUMNS: Mapping[str, Column] = {
    "vllm": Column("fs", "lru"),
    "fs": Column("kvtier-fs"),
    "fs-arc": Column("kvtier-fs", "kvtier-arc"),
    "fs-hazard": Column("kvtier-fs", "kvtier-hazard"),
    "obj": Column("kvtier-obj", module="obstore"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case in one column.

    Attributes:
        num_found: tokens that were not computed, where they could be found.
        num_findable: how many those are.
        difference: the largest difference of a log-probability from the engine without offloading; infinite where
            tokens differ.
        note: what else there is to say.
    """

    num_found: int
    num_findable: int
    difference: float
    note: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether every answer was that of the engine without offloading."""
        return self.difference <= LOGPROB_TOLERANCE


@dataclass
class Lab:
    """Where a case runs.

    Attributes:
        folder: its own, empty; checkpoints are in the one above.
        column: what it tries.
        alone: answers of engines without offloading.
        engines: running ones, that cases may share; None starts one for each.
    """

    folder: Path
    column: Column
    alone: Alone
    engines: EnginePool | None = None
    differences: list[float] = field(default_factory=list)

    @property
    def blocks(self) -> Path:
        """The tier's folder."""
        return self.folder / "blocks"

    def options(self, model: str = "llama", host: str = HOST, **more: Any) -> EngineOptions:  # Any: fields
        """Return how to start an engine."""
        settings = {
            # vLLM's own reads a number here.
            "cpu_bytes_to_use": parse_size(host),
            "eviction_policy": self.column.policy,
            "offload_prompt_only": True,
            "secondary_tiers": [self.column.entry(self.blocks)],
        }
        made = make_options(self.model(model), model, settings)
        return replace(made, is_stock=True, **more)

    @contextmanager
    def engine(self, model: str = "llama", **more: Any) -> Iterator[EngineProcess]:  # Any: as above
        """Run an engine that ends as it ends of itself."""
        with EngineProcess(self.options(model, **more)) as engine:
            yield engine

    @contextmanager
    def engine_as_new(self) -> Iterator[EngineProcess]:
        """Run an engine, or borrow one that a reset has made as good as new: it finds nothing of before."""
        if self.engines is None or not self.column.is_ours:
            with self.engine() as engine:
                yield engine
            return
        shared = replace(self, folder=self.folder.parent / f"shared-{self.column.tier}")
        with self.engines.borrow(shared.options()) as engine:
            yield engine

    def model(self, name: str) -> str:
        """Return the folder of a model, which is made once."""
        return str(make_once(self.folder.parent / name, partial(MODELS[name])))

    def expected(self, model: str = "llama", method: str = "generate_in_turn", **more: Any) -> list[Answer]:
        """Return the answers of an engine without offloading to the model's prompts."""
        options = replace(make_options(self.model(model), model, None), **more)
        return self.alone.answers(options, method, prompts_of(model), sampling_of(model))

    def serve(
        self,
        engine: EngineProcess,
        expected: Sequence[Answer],
        numbers: Sequence[int] | None = None,
        **more: Any,
    ) -> int:
        """Let an engine answer prompts; compare the answers and return how many tokens were found."""
        model, method = more.get("model", "llama"), more.get("method", "generate_in_turn")
        chosen = range(len(prompts_of(model))) if numbers is None else numbers
        answers = engine.call(method, [prompts_of(model)[one] for one in chosen], sampling_of(model))
        return self.compare(answers, [expected[one] for one in chosen])

    def compare(self, answers: Sequence[Answer], expected: Sequence[Answer]) -> int:
        """Note how far answers differ from what was expected; return how many tokens were found."""
        self.differences.append(largest_difference(answers, expected))
        return sum(answer.num_cached_tokens for answer in answers)

    def outcome(self, num_found: int, num_findable: int, note: str = "") -> Outcome:
        """Return what came of the case, with all that was compared."""
        return Outcome(num_found, num_findable, max(self.differences), note)


def parse_size(size: str) -> int:
    """Return a size in MiB as bytes."""
    return int(size.removesuffix("MiB")) * 2**20


def make_options(folder: str, model: str, settings: Json | None) -> EngineOptions:
    """Return how to start an engine of one of the models."""
    if model == "qwen":
        return recurrent.options_with(folder, settings)
    num_blocks = CONTROL_POOL_BLOCKS if settings is None else DEVICE_BLOCKS * (3 if model == "gemma" else 1)
    return EngineOptions(folder, settings, num_blocks)


def prompts_of(model: str) -> list[list[int]]:
    """Return what a model is asked."""
    return recurrent.PROMPTS if model == "qwen" else PROMPTS


def sampling_of(model: str) -> Json:
    """Return how it answers."""
    return recurrent.GREEDY if model == "qwen" else GREEDY


def findable(model: str = "llama") -> int:
    """Return how many tokens of its prompts are in whole blocks."""
    return sum(recurrent.FOUND) if model == "qwen" else WHOLE_TOKENS * len(PROMPTS)


def save_adapter(folder: Path) -> Path:
    """Save a LoRA adapter for the Llama, large enough to change answers."""
    folder.mkdir()
    size, rank = COMMON["hidden_size"], 8
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=generator) * 0.2
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "llama": save_llama,
    "gemma": save_gemma,
    "qwen": save_qwen3_next,
    "adapter": save_adapter,
}


def serve_and_restart(lab: Lab, model: str, host: str) -> Outcome:
    """Compute prompts, find them again, all together and in another engine."""
    expected = lab.expected(model)
    with lab.engine(model, host=host) as engine:
        lab.serve(engine, expected, model=model)
        engine.call("settle")
        found = lab.serve(engine, expected, model=model)
        together = lab.serve(engine, expected, model=model, method="generate")
        engine.call("settle")
    with lab.engine(model, host=host) as engine:
        restarted = lab.serve(engine, expected, model=model)
    note = f"in turn {found:,}, together {together:,}, restarted {restarted:,}"
    return lab.outcome(found + together + restarted, 3 * findable(model), note)


def full_attention(lab: Lab) -> Outcome:
    """Full attention."""
    return serve_and_restart(lab, "llama", HOST)


def sliding_windows(lab: Lab) -> Outcome:
    """Sliding windows beside full attention."""
    return serve_and_restart(lab, "gemma", "12MiB")


def recurrent_states(lab: Lab) -> Outcome:
    """Recurrent states beside full attention."""
    return serve_and_restart(lab, "qwen", "64MiB")


def adapters(lab: Lab) -> Outcome:
    """A LoRA adapter: its blocks are its own."""
    more: Json = {"engine_arguments": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}}
    adapter = str(make_once(lab.folder.parent / "adapter", save_adapter))
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    alone = make_options(lab.model("llama"), "llama", None)
    with EngineProcess(replace(alone, **more)) as engine:
        plain = engine.call("generate_requests", requests, GREEDY)
        assert engine.call("forget_device")
        adapted = engine.call("generate_requests", requests, GREEDY, adapter)
    assert largest_difference(plain, adapted) > 10 * LOGPROB_TOLERANCE, "the adapter changes nothing"
    with lab.engine(**more) as engine:
        lab.compare(engine.call("generate_requests", requests, GREEDY), plain)
        engine.call("settle")
        assert engine.call("forget_device")
        strangers = lab.compare(engine.call("generate_requests", requests, GREEDY, adapter), adapted)
        engine.call("settle")
        assert engine.call("forget_device")
        found = lab.compare(engine.call("generate_requests", requests, GREEDY, adapter), adapted)
        found += lab.compare(engine.call("generate_requests", requests, GREEDY), plain)
    assert strangers == 0, "blocks without the adapter were found with it"
    return lab.outcome(found, 6 * WHOLE_TOKENS)


def salts(lab: Lab) -> Outcome:
    """Cache salts: what one salt has stored is not found with another."""
    expected = lab.expected()[:3]
    with lab.engine_as_new() as engine:
        first = [{"prompt_token_ids": prompt, "cache_salt": "first"} for prompt in PROMPTS[:3]]
        second = [{"prompt_token_ids": prompt, "cache_salt": "second"} for prompt in PROMPTS[:3]]
        lab.compare(engine.call("generate_requests", first, GREEDY), expected)
        engine.call("settle")
        assert engine.call("forget_device")
        strangers = lab.compare(engine.call("generate_requests", second, GREEDY), expected)
        engine.call("settle")
        assert engine.call("forget_device")
        found = lab.compare(engine.call("generate_requests", first, GREEDY), expected)
    assert strangers == 0, "blocks of one salt were found with another"
    return lab.outcome(found, 3 * WHOLE_TOKENS)


def aborts(lab: Lab) -> Outcome:
    """Requests that are aborted while they compute and while they load."""
    expected = lab.expected()
    num_loading = 0
    with lab.engine_as_new() as engine:
        for prompt in PROMPTS[:3]:
            engine.call("abort_while_computing", prompt)
        lab.serve(engine, expected)
        engine.call("settle")
        for prompt in PROMPTS:
            assert engine.call("forget_device")
            num_loading += engine.call("abort_while_loading", prompt)
        engine.call("settle")
        found = lab.serve(engine, expected)
    return lab.outcome(found, findable(), f"{num_loading} aborted in a load")


def resets(lab: Lab) -> Outcome:
    """A reset: what was stored before it is not found, what is stored after it is."""
    expected = lab.expected()
    with lab.engine_as_new() as engine:
        lab.serve(engine, expected)
        engine.call("settle")
        assert engine.call("reset")
        old = lab.serve(engine, expected)
        engine.call("settle")
        assert engine.call("forget_device")
        found = lab.serve(engine, expected)
    return lab.outcome(found, findable(), f"{old:,} of before the reset")


def sleep(lab: Lab) -> Outcome:
    """Sleep and waking up."""
    expected = lab.expected()
    with lab.engine_as_new() as engine:
        lab.serve(engine, expected)
        engine.call("settle")
        engine.call("sleep_and_wake", 1)
        over = lab.serve(engine, expected)
        engine.call("settle")
        assert engine.call("forget_device")
        found = lab.serve(engine, expected)
    return lab.outcome(found, findable(), f"{over:,} kept over the sleep")


def two_engines(lab: Lab) -> Outcome:
    """Two engines on one directory while both run."""
    expected = lab.expected()
    with lab.engine() as engine, lab.engine() as other:
        lab.serve(engine, expected, range(3))
        lab.serve(other, expected, range(3, 6))
        engine.call("settle")
        other.call("settle")
        found = lab.serve(engine, expected, range(3, 6)) + lab.serve(other, expected, range(3))
    return lab.outcome(found, findable())


def disk_gone(lab: Lab) -> Outcome:
    """The directory is removed while the engine runs, and a file is in its way later."""
    expected = lab.expected()
    with lab.engine() as engine:
        lab.serve(engine, expected)
        engine.call("settle")
        shutil.rmtree(lab.blocks)
        gone = lab.serve(engine, expected)
        engine.call("settle")
        shutil.rmtree(lab.blocks, ignore_errors=True)
        lab.blocks.write_text("in the way")
        lab.serve(engine, expected)
        engine.call("settle")
    return lab.outcome(gone, 0, f"{gone:,} from host memory")


def disk_full(lab: Lab) -> Outcome:
    """The disk has room for a quarter of the blocks."""
    expected = lab.expected()
    with small_disk_at(lab.folder / "disk", "6m") as disk:
        on_disk = replace(lab, folder=disk)
        with on_disk.engine() as engine:
            lab.serve(engine, expected)
            engine.call("settle")
            full = lab.serve(engine, expected)
            engine.call("settle")
        with on_disk.engine() as engine:
            restarted = lab.serve(engine, expected)
    return lab.outcome(restarted, 0, f"in turn {full:,}, restarted {restarted:,}")


def killed(lab: Lab) -> Outcome:
    """An engine is killed while it stores; another one finds what was whole."""
    expected = lab.expected()
    engine = EngineProcess(lab.options())
    engine.__enter__()
    lab.serve(engine, expected)
    engine.kill()
    with lab.engine() as other:
        kept = lab.serve(other, expected)
        other.call("settle")
        found = lab.serve(other, expected)
    return lab.outcome(found, findable(), f"{kept:,} of the one that was killed")


CASES: Mapping[str, Callable[[Lab], Outcome]] = {
    case.__name__.replace("_", " "): case
    for case in (
        full_attention,
        sliding_windows,
        recurrent_states,
        adapters,
        salts,
        aborts,
        resets,
        sleep,
        two_engines,
        disk_gone,
        disk_full,
        killed,
    )
}
"""By the name that a command line takes."""

ONLY_ATTENTION = ("fs-arc", "fs-hazard", "obj")
"""Columns that differ in the policy or the tier alone: one case shows that they work."""


def try_case(
    name: str, column: str, folder: Path, alone: Alone, engines: EnginePool | None = None
) -> Outcome:
    """Run a case in a folder of its own."""
    own = folder / f"{name.replace(' ', '-')}-{column}"
    own.mkdir()
    return CASES[name](Lab(own, COLUMNS[column], alone, engines))


def missing_library(column: str) -> str:
    """Return the library that a column needs and that is not installed; empty when there is none."""
    module = COLUMNS[column].module
    return "" if find_spec(module) else module
