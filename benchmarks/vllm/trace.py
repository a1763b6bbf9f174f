"""Answers of a recorded trace with and without kvtier, request by request, from a device pool that is far too small.

All requests come at once and eight run at a time; the times between them are not replayed. Lengths are scaled so that
the longest prompt fits the model. Both engines have the same pool: a twentieth of the distinct blocks in all prompts,
or what the longest request needs if that is more. Greedy tokens must be equal; where they are, log-probabilities show
how close the computations were.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.vllm.checkpoints import SMALL, save_llama
from benchmarks.vllm.engine import Answer, EngineOptions, Served
from benchmarks.vllm.engine_process import EngineProcess
from kvtier.cli.demo.trace import make_prompt, read_trace

BLOCK_TOKENS = 32
"""The least that vLLM's CPU backend accepts: scaled prompts share few tokens."""

MAX_MODEL_TOKENS = 4096
STEP_TOKENS = 1024
"""Tokens per step: long prompts are computed in several steps."""

CONCURRENCY = 8
POOL_RATIO = 0.05
HOST_RATIO = 0.25
"""Share of the working set that host memory holds; the fs tier holds all."""

LOGPROB_TOLERANCE = 2e-3
"""Largest difference that rounding explains: float32, other batches and chunks."""


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Sizes of a run.

    Attributes:
        num_prompts: requests, each pass counted.
        num_prompt_tokens: tokens of all of them.
        scale_ratio: factor of the lengths.
        num_working_blocks: distinct blocks of all prompts.
        num_pool_blocks: device blocks, including the null block.
        is_pool_for_longest: whether the longest request sets the size of the pool.
        num_host_blocks: blocks that host memory holds.
    """

    num_prompts: int
    num_prompt_tokens: int
    scale_ratio: float
    num_working_blocks: int
    num_pool_blocks: int
    is_pool_for_longest: bool
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers differ.

    Attributes:
        other_tokens: numbers of the requests whose tokens differ.
        largest_difference: of the log-probabilities of equal tokens.
    """

    other_tokens: tuple[int, ...]
    largest_difference: float


@dataclass(frozen=True, slots=True)
class TraceResult:
    """Result of a run.

    Attributes:
        plan: sizes of the run.
        comparison: of the answers with and without kvtier.
        loaded_tokens: tokens that kvtier loaded, by tier; those loaded again after a pre-emption included.
        cached_tokens: prompt tokens that were found anywhere, with kvtier.
        plain_cached_tokens: the same without kvtier.
        time_s: all requests with kvtier.
        plain_time_s: all requests without kvtier.
    """

    plan: TracePlan
    comparison: Comparison
    loaded_tokens: dict[str, int]
    cached_tokens: int
    plain_cached_tokens: int
    time_s: float
    plain_time_s: float


def measure(
    folder: Path, trace: Path, num_requests: int, num_passes: int, num_answer_tokens: int
) -> TraceResult:
    """Serve the first requests of a trace without kvtier and with it, and print how they compare.

    Args:
        folder: for the checkpoint and the fs tier.
        trace: JSON lines.
        num_requests: number of requests from its start.
        num_passes: how often they are served in a row; the second pass finds the stores of the first.
        num_answer_tokens: tokens generated for each.
    """
    prompts, scale_ratio = scale_prompts(trace, num_requests, num_answer_tokens)
    served_prompts = prompts * num_passes
    plan = make_plan(served_prompts, scale_ratio)
    print(f"{trace.name}: {asdict(plan)}", flush=True)
    model = str(save_llama(folder / "model", SMALL))
    plain = serve(model, None, plan, served_prompts, num_answer_tokens)
    served = serve(model, make_settings(plan, folder), plan, served_prompts, num_answer_tokens)
    result = TraceResult(
        plan=plan,
        comparison=compare(served.answers, plain.answers),
        loaded_tokens=served.loaded_tokens,
        cached_tokens=count_cached(served),
        plain_cached_tokens=count_cached(plain),
        time_s=served.time_s,
        plain_time_s=plain.time_s,
    )
    print_result(result)
    return result


def scale_prompts(trace: Path, num_requests: int, num_answer_tokens: int) -> tuple[list[list[int]], float]:
    """Return the prompts of a trace, scaled so that the longest fits with its answer, and the scale."""
    requests = read_trace(trace, num_requests)
    longest_tokens = max(request.num_prompt_tokens for request in requests)
    scale_ratio = min(1.0, (MAX_MODEL_TOKENS - num_answer_tokens) / longest_tokens)
    return [
        list(make_prompt(request, index, scale_ratio)) for index, request in enumerate(requests)
    ], scale_ratio


def make_plan(prompts: Sequence[Sequence[int]], scale_ratio: float) -> TracePlan:
    """Size the pool and host memory. Pure."""
    blocks = {
        tuple(prompt[:end])
        for prompt in prompts
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
    }
    num_wanted = round(POOL_RATIO * len(blocks))
    num_longest = MAX_MODEL_TOKENS // BLOCK_TOKENS
    return TracePlan(
        num_prompts=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        scale_ratio=scale_ratio,
        num_working_blocks=len(blocks),
        # vLLM uses one block of the pool as its null block.
        num_pool_blocks=1 + max(num_wanted, num_longest),
        is_pool_for_longest=num_longest > num_wanted,
        num_host_blocks=max(round(HOST_RATIO * len(blocks)), num_longest),
    )


def make_settings(plan: TracePlan, folder: Path) -> dict[str, object]:
    """Return kvtier's settings: a host tier for a part of the working set, an fs tier for all of it."""
    cpu_bytes = plan.num_host_blocks * SMALL.token_bytes * BLOCK_TOKENS
    tier = {
        "type": "fs",
        "root_dir": str(folder / "blocks"),
        "capacity_bytes": "8GiB",
        # The default, an eighth of so small a host tier, is less than a step stores: the rest would be declined.
        "max_in_flight_store_bytes": cpu_bytes // 2,
    }
    return {"cpu_bytes_to_use": cpu_bytes, "secondary_tiers": [tier]}


def serve(
    model: str,
    settings: dict[str, object] | None,
    plan: TracePlan,
    prompts: Sequence[Sequence[int]],
    num_answer_tokens: int,
) -> Served:
    """Serve all prompts in a new engine."""
    options = EngineOptions(
        model,
        settings,
        num_device_blocks=plan.num_pool_blocks,
        block_tokens=BLOCK_TOKENS,
        max_model_tokens=MAX_MODEL_TOKENS,
        step_tokens=STEP_TOKENS,
        max_num_seqs=CONCURRENCY,
    )
    with EngineProcess(options) as engine:
        return engine.serve(prompts, num_answer_tokens, has_logprobs=True)


def compare(answers: Sequence[Answer], others: Iterable[Answer]) -> Comparison:
    """Compare request by request. Pure."""
    other_tokens: list[int] = []
    largest_difference = 0.0
    for number, (answer, other) in enumerate(zip(answers, others, strict=True)):
        if answer.tokens != other.tokens:
            other_tokens.append(number)
            continue
        differences = (abs(one - two) for one, two in zip(answer.logprobs, other.logprobs, strict=True))
        largest_difference = max(largest_difference, *differences)
    return Comparison(tuple(other_tokens), largest_difference)


def count_cached(served: Served) -> int:
    """Return the prompt tokens that were not computed. Pure."""
    return sum(answer.num_cached_tokens for answer in served.answers)


def print_result(result: TraceResult) -> None:
    """Print the differences, the origins of tokens, and the times."""
    other = result.comparison.other_tokens
    difference = result.comparison.largest_difference
    num_prompts, num_tokens = result.plan.num_prompts, result.plan.num_prompt_tokens
    print(f"tokens: {f'requests {other} DIFFER' if other else 'identical'}, of {num_prompts} requests")
    outcome = "within" if difference <= LOGPROB_TOLERANCE else "BEYOND"
    print(f"log-probabilities: at most {difference:.1e} apart, {outcome} {LOGPROB_TOLERANCE}")
    print(
        f"found: {result.cached_tokens} of {num_tokens} prompt tokens, {result.plain_cached_tokens} without kvtier"
    )
    print(f"loaded by tier: {result.loaded_tokens}")
    print(f"time: {result.time_s:.1f} s, {result.plain_time_s:.1f} s without kvtier")
