"""Compare the pages of two releases of vLLM: do engines of both find each other's blocks, with equal bytes and answers?

    make test-vllm VLLM_VERSION=0.31.0    # makes an environment, and likewise for the other release
    PYTHONPATH=$PWD/src python -m scripts.compare_releases .venv-vllm-0.31.0/bin/python .venv-vllm-0.32.0/bin/python

An engine of each release stores the blocks of some prompts. One of the other release answers from them, another one
computes everything and compares it with them (``audit_ratio: 1``). Both must answer as an engine without kvtier. Add a
new release to ``CONFIRMED_RELEASES`` of ``kvtier.engines.vllm.compat`` first, and keep it there if no line says
DIFFERENT or FAILED. Where nothing is found, the line has the fields of the name that differ: one that cannot change a
byte belongs into ``EXCLUDED`` or ``VALUES_WITHOUT_FIELD`` of ``kvtier.engines.vllm.named_fields``. Exit status 1 with
such a line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.namespace import differences

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600.0
"""Guard against a hang; an engine takes half a minute on an idle machine."""

DIFFERENT, FAILED = "DIFFERENT", "FAILED"
FAMILIES: Mapping[str, Mapping[str, Any]] = {  # Any: vLLM's own arguments
    "llama": {"dtype": "bfloat16"},
    "llama-float32": {"dtype": "float32", "block_size": 128},
    "llama-fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "llama-16": {"dtype": "bfloat16", "block_size": 16},
    "gemma": {"dtype": "bfloat16"},
    "deepseek": {"dtype": "bfloat16"},
    "qwen3_next": {"dtype": "bfloat16", "block_size": 256, "mamba_cache_mode": "align"},
}
"""What is compared; a name begins with that of a model of ``tests.e2e.vllm.checkpoints``."""


class Run(NamedTuple):
    """What came of one engine.

    Attributes:
        tokens: of each answer.
        num_found: tokens of prompts that it did not compute.
        audited: blocks that its audit compared, by outcome.
        error: why there is no answer; empty when there is one.
    """

    tokens: Sequence[Sequence[int]] = ()
    num_found: int = 0
    audited: Mapping[str, int] = {}
    error: str = ""


def main() -> int:
    """Compare two releases; return 1 when a family's pages differ, or an engine failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", nargs=2, help="interpreter of an environment of make test-vllm")
    parser.add_argument("--only", default="", metavar="TEXT", help="families whose names have this text")
    parser.add_argument(
        "--tiles", action="store_true", help="compute with AMX tiles, which the tests leave out"
    )
    arguments = parser.parse_args()
    if arguments.tiles:
        os.environ["KVTIER_TEST_TILES"] = "1"
    is_proof = True
    for family in (name for name in FAMILIES if arguments.only in name):
        with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
            for line in compare(arguments.python, family, Path(folder)):
                print(f"{family}: {line}", flush=True)
                is_proof &= DIFFERENT not in line and FAILED not in line
    return int(not is_proof)


def compare(pythons: Sequence[str], family: str, folder: Path) -> Iterator[str]:
    """Yield a line for each of two releases that reads what the other one has stored."""
    for number, (writer, reader) in enumerate([tuple(pythons), tuple(reversed(pythons))]):
        blocks = folder / f"blocks-{number}"

        def run(python: str, mode: str, blocks: Path = blocks) -> Run:
            return run_engine(python, mode, family, folder / "model", blocks)

        stored, alone = run(writer, "store"), run(reader, "alone")
        loaded, audited = run(reader, "load"), run(reader, "audit")
        error = next((one.error for one in (stored, alone, loaded, audited) if one.error), "")
        yield f"{reader} reads {writer}: {f'{FAILED}: {error}' if error else judge(alone, loaded, audited, blocks)}"


def judge(alone: Run, loaded: Run, audited: Run, blocks: Path) -> str:
    """Return what came of three engines of a release, of which the last two had the other release's blocks."""
    if not loaded.num_found:
        documents = [path.read_text(encoding="utf-8") for path in sorted(blocks.glob("*/namespace.json"))]
        fields = [one.field for one in differences(*documents)] if len(documents) == 2 else ["the keys"]
        return f"nothing is found, {DIFFERENT}: {', '.join(fields)}"
    answers = "equal" if loaded.tokens == audited.tokens == alone.tokens else DIFFERENT
    counts = [f"{count} blocks {outcome}" for outcome, count in audited.audited.items() if count]
    pages = f"{DIFFERENT} blocks" if audited.audited["wrong"] else ", ".join(counts) or "no block compared"
    return f"{loaded.num_found} tokens loaded, {pages}, answers {answers}"


def run_engine(python: str, mode: str, family: str, model: Path, blocks: Path) -> Run:
    """Run one engine in a release's environment; return what came of it."""
    code = "import sys; from scripts.compare_releases import answer; answer(*sys.argv[1:])"
    command = [python, "-c", code, mode, family, str(model), str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=TIMEOUT_S)  # noqa: S603
    if done.returncode:
        return Run(error=(done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def answer(mode: str, family: str, model: str, blocks: str) -> None:
    """Be one engine: answer prompts and print what came of it as the last line. Saves the model where there is none."""
    from tests.e2e.vllm import checkpoints
    from tests.e2e.vllm.engine_host import EngineOptions
    from tests.e2e.vllm.engine_process import EngineProcess
    from tests.e2e.vllm.prompts import GREEDY, make_prompt

    name = family.partition("-")[0]
    if not Path(model).exists():
        getattr(checkpoints, f"save_{name}")(Path(model))
    # Behind a hit vLLM's reference attention for latents computes one token at most.
    prompts = [make_prompt(seed, 993) for seed in range(4)]
    tier = {"type": "fs", "root_dir": blocks, "capacity_bytes": "2GiB", "required": True}
    settings = {
        "cpu_bytes_to_use": "256MiB",
        "secondary_tiers": [tier],
        "audit_ratio": float(mode == "audit"),
    }
    options = EngineOptions(
        model,
        None if mode == "alone" else settings,
        num_device_blocks=600,
        engine_arguments=dict(FAMILIES[family]),
        keeps_prefix_caching=name == "deepseek",
    )
    with EngineProcess(options) as engine:
        answers = engine.call("generate_in_turn", prompts, GREEDY)
        stats: dict[str, float] = {}
        if mode != "alone":
            engine.call("settle")
            engine.call("check")
            stats = engine.call("stats")
    audited = {
        outcome: int(stats.get(f"audit.{outcome}_blocks", 0)) for outcome in ("equal", "close", "wrong")
    }
    num_found = sum(one.num_cached_tokens for one in answers)
    print(json.dumps(Run([one.tokens for one in answers], num_found, audited)._asdict()))


if __name__ == "__main__":
    sys.exit(main())
