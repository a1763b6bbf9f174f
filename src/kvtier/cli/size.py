"""``kvtier size MODEL``: how many tokens of a model fit into host memory, from its shape alone, without a trace."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from kvtier import __version__
from kvtier.cli.output import make_console, make_table, print_line
from kvtier.errors import ConfigError
from kvtier.quantities import parse_capacity
from kvtier.sim.known_models import SizedModel, find_model, list_models

GIB = 2**30
HOST_SIZES = "64GiB,256GiB,1TiB"
PROMPT_TOKENS = 8192
"""Tokens of the example prompt: a long document or a dozen turns of a chat."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The memory that a model's keys and values take in tiers.

    Attributes:
        model: the model.
        tensor_parallel_size: workers that divide its KV heads.
        bytes_per_token: bytes of a token that all workers store together.
    """

    model: SizedModel
    tensor_parallel_size: int
    bytes_per_token: int

    def tokens_in(self, num_bytes: int) -> int:
        """Return how many tokens fit into so many bytes. Pure."""
        return num_bytes // self.bytes_per_token

    def to_json(self, host_sizes: Sequence[int]) -> dict[str, Any]:  # Any: JSON
        """Return the values as JSON objects."""
        return {
            "kvtier": __version__,
            "model": self.model.name,
            "kv_dtype": self.model.shape.kv_dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "bytes_per_token": self.bytes_per_token,
            "tokens_per_gib": self.tokens_in(GIB),
            "hosts": [{"host_bytes": size, "tokens": self.tokens_in(size)} for size in host_sizes],
            "assumptions": list(list_notes(self)),
        }


def size(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A config.json, its folder, or a well-known model; none: all of these."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of keys and values, such as fp8; default: the model's.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel workers of the engine.")] = 1,
    state_interval: Annotated[
        int | None, typer.Option(help="Tokens between kept recurrent states; default: one for each block.")
    ] = None,
    host: Annotated[str, typer.Option(help="Sizes of host memory, by comma.")] = HOST_SIZES,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")] = False,
) -> None:
    """Print how many tokens of a model fit into host memory.

    Without MODEL the well-known models are listed side by side.

    Raises:
        ConfigError: a value is not valid, or the model's KV cache is not supported.
        UnknownNameError: the model is neither a file nor well known.
    """
    if as_json and markdown:
        raise ConfigError("--markdown", "--json", "print one of them")
    labels = [text.strip() for text in host.split(",") if text.strip()]
    if not labels:
        raise ConfigError("--host", host, "give at least one size, such as 64GiB")
    host_sizes = [parse_capacity("--host", label) for label in labels]
    models = list_models(dtype) if model is None else (find_model(model, dtype),)
    if state_interval is not None:
        models = tuple(replace(one, shape=one.shape.with_state_interval(state_interval)) for one in models)
    sizes = [ModelSize(one, tp, one.shape.stored_bytes_per_token(tp)) for one in models]
    if as_json:
        found = [one.to_json(host_sizes) for one in sizes]
        typer.echo(json.dumps(found if model is None else found[0], indent=1))
    elif markdown:
        typer.echo("\n".join(make_markdown(sizes, labels, host_sizes)))
    else:
        print_sizes(sizes, labels, host_sizes, is_list=model is None)


def print_sizes(
    sizes: Sequence[ModelSize], labels: Sequence[str], host_sizes: Sequence[int], *, is_list: bool
) -> None:
    """Print one model in sentences and by size of host memory, or a list of models."""
    console = make_console()
    if is_list:
        headings = ("KiB a\ntoken", "1GiB", *labels)
        table = make_table("Tokens that fit into host memory", ("model",), headings)
        for one in sizes:
            name, _, *numbers = _cells(one, host_sizes)
            table.add_row(name.rpartition("/")[2], *numbers)
        console.print(table)
        return
    (one,) = sizes
    print_line(
        console,
        f"{one.model.name}: a token takes {format_kib(one.bytes_per_token)}, "
        f"so {one.tokens_in(GIB):,} tokens fit into a GiB",
    )
    table = make_table("", ("host",), ("tokens", f"prompts of {PROMPT_TOKENS:,} tokens"))
    for label, num_bytes in zip(labels, host_sizes, strict=True):
        num_tokens = one.tokens_in(num_bytes)
        table.add_row(label, f"{num_tokens:,}", f"{num_tokens // PROMPT_TOKENS:,}")
    console.print(table)
    for note in list_notes(one):
        print_line(console, f"- {note}")


def make_markdown(
    sizes: Sequence[ModelSize], labels: Sequence[str], host_sizes: Sequence[int]
) -> Iterator[str]:
    """Yield the lines of a Markdown table. Pure."""
    headings = ["model", "type", "KiB a token", "tokens in 1GiB", *labels]
    yield f"| {' | '.join(headings)} |"
    yield f"|---|---|{'---:|' * (len(headings) - 2)}"
    for one in sizes:
        yield f"| {' | '.join(_cells(one, host_sizes))} |"


def list_notes(one: ModelSize) -> Iterator[str]:
    """Yield what the numbers mean for this model, in sentences. Pure."""
    shape = one.model.shape
    yield f"keys and values are {shape.kv_dtype}, all layers and workers together"
    own = shape.stored_bytes_per_token(one.tensor_parallel_size, shares_copies=False)
    if one.bytes_per_token != shape.bytes_per_token:
        yield (
            f"each of {one.tensor_parallel_size} workers stores what it holds, copies included: "
            f"without copies a token takes {format_kib(shape.bytes_per_token)}"
        )
    elif own != one.bytes_per_token:
        yield (
            f"what several of {one.tensor_parallel_size} workers hold is stored once, as under vLLM: in host memory "
            f"alone with a smaller /dev/shm each stores its copy, and a token takes {format_kib(own)}"
        )
    yield from shape.assumptions
    yield "blocks are taken as full; the last block of a prompt may not be"


def format_kib(num_bytes: int) -> str:
    """Return a token's bytes in KiB, to three digits. Pure."""
    return f"{num_bytes / 1024:.3g} KiB"


def _cells(one: ModelSize, host_sizes: Sequence[int]) -> list[str]:
    numbers = [f"{one.tokens_in(num_bytes):,}" for num_bytes in (GIB, *host_sizes)]
    return [one.model.name, one.model.shape.kv_dtype, f"{one.bytes_per_token / 1024:.4g}", *numbers]
