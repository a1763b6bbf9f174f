"""What the commands about a place have in common: options, durations in and out, how a namespace is described."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.errors import ConfigError, NamespaceDocumentError
from kvtier.namespace import Document, parse_document
from kvtier.settings import absolute_path
from kvtier.tiering.kit.key_ring import read_ring
from kvtier.tiering.kit.place import Opener, Place, PlaceNamespace
from kvtier.tiering.places import open_place

PLACE_HELP = (
    "A tier's own setting: a directory (fs), a URL such as s3://bucket, file:///folder (obj), "
    "redis://host, valkey://host (valkey); or the tier as in secondary_tiers, as JSON, which mooncake needs: "
    '{"type": "mooncake", "master": "host:port", "allow_any_interface": true}.'
)

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLACE",
        help=PLACE_HELP,
    ),
]

OptionalPlaceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[PLACE]",
        help=PLACE_HELP,
        show_default=False,
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

KeyFileOption = Annotated[
    str | None,
    typer.Option(
        "--key-file",
        help="The key ring of encrypted blocks: tells their tenants too.",
        show_default=False,
    ),
]

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="The settings of an engine, as kvtier doctor reads them: names the tenants of requests, of engines with "
        "its tenant_salt.",
        show_default=False,
    ),
]

UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")
PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
MAX_DURATION_S = 100 * 365 * 86_400.0

MIN_PREFIX_CHARS = 4
"""Characters of a namespace's name that must be given: fewer are soon those of two."""


def parse_duration(option: str, text: str) -> float:
    """Return the seconds that a text such as "10m", "1h30m" or "7d" stands for. Pure.

    Raises:
        ConfigError: it stands for none, or for more than a hundred years.
    """
    plain = text.strip().lower()
    duration_s = (
        sum(float(number) * UNIT_S[unit] for number, unit in PART.findall(plain))
        if DURATION.fullmatch(plain)
        else 0.0
    )
    if not 0 < duration_s <= MAX_DURATION_S:
        remedy = 'must be a time above zero with its unit, such as "90s", "10m", "1h30m", "7d" or "4w"'
        raise ConfigError(option, text, remedy, max_value_chars=80)
    return duration_s


def duration_in_words(duration_s: float) -> str:
    """Return a duration with one unit, for people. Pure."""
    for unit in ("w", "d", "h", "m"):
        if duration_s >= 2 * UNIT_S[unit]:
            return f"{duration_s / UNIT_S[unit]:.0f} {UNIT_WORDS[unit]}"
    return f"{max(duration_s, 0):.0f} s"


def in_words_from(now_s: float, then_s: float) -> str:
    """Return when something was, for people; two clocks may differ by some seconds. Pure."""
    if then_s - now_s < MAX_CLOCK_DIFFERENCE_S:
        return f"{duration_in_words(now_s - then_s)} ago"
    return f"{duration_in_words(then_s - now_s)} ahead of this machine's clock"


MAX_CLOCK_DIFFERENCE_S = 60.0
"""How far ahead a time may be that is taken for now. Less calls hosts wrong whose clocks are kept well enough; more
takes a clock that is wrong for a block just used."""

UNIT_WORDS = {"w": "weeks", "d": "days", "h": "h", "m": "min"}


def counted(num: int, word: str) -> str:
    """Return a number and what it counts, in the plural where it is not one. Pure."""
    return f"{num:,} {word}" if num == 1 else f"{num:,} {word}s"


def printable(text: str) -> str:
    """Return ``text`` without what moves a terminal's cursor: who writes into a place chooses the words in it. Pure."""
    return "".join(one if one.isprintable() else "?" for one in text)


@contextmanager
def opened(text: str, key_file: str | None = None) -> Iterator[Place]:
    """Open a place and close it.

    Args:
        text: the place.
        key_file: the key ring of its encrypted blocks; None: they are not opened.

    Raises:
        KVTierError: as ``open_place``, or the ring cannot be used.
    """
    opener = None if key_file is None else read_opener(key_file)
    place = open_place(text)
    try:
        if opener is not None:
            place.unlock(opener)
        yield place
    finally:
        place.close()


def read_opener(key_file: str) -> Opener:
    """Return what opens encrypted blocks with the keys of a ring.

    Raises:
        ConfigError: the ring cannot be used.
        MissingExtraError: the library is not installed.
    """
    ring = read_ring(absolute_path("--key-file", str(Path(key_file).absolute())))
    from kvtier.tiering.kit.encryption import BlockOpener

    return BlockOpener(ring)


def read_document(namespace: PlaceNamespace) -> Document | None:
    """Return what a namespace's document says, None where there is none that can be read. Pure."""
    try:
        return parse_document(namespace.document) if namespace.document else None
    except NamespaceDocumentError:
        return None


def encrypted_names(namespaces: Iterable[PlaceNamespace]) -> frozenset[str]:
    """Return the names of the namespaces whose blocks are encrypted: the names of those tell no tenant. Pure."""
    return frozenset(
        one.name
        for one in namespaces
        if (document := read_document(one)) is not None and document.get("encryption")
    )


def describe(document: Document) -> list[str]:
    """Return the identity of a namespace in words, the most telling first. Pure."""
    model = document.get("model")
    model = model if isinstance(model, dict) else {}
    config = _flattened(model.get("config"))
    parts = [
        f"model {model.get('name', '?')}",
        str(model.get("dtype") or "?"),
        # vLLM names the setting, the type, and NONE where nothing is quantized.
        f"KV {str(document.get('kv_dtype', '?')).removeprefix('auto: ').replace(' NONE', '')}",
    ]
    revision = str(model.get("revision") or "")
    if revision:
        parts.append(f"revision {revision[:48]}")
    if model.get("weights"):
        parts.append(f"weights {str(model['weights'])[:48]}")
    parts += [
        f"{words} {config[name]}" for name, words in CONFIG_WORDS.items() if config.get(name) not in NO_WORDS
    ]
    groups = document.get("groups")
    if isinstance(groups, list):
        tokens = sorted({str(group.get("block_size_tokens")) for group in groups if isinstance(group, dict)})
        parts.append(f"{counted(len(groups), 'KV group')} of {'/'.join(tokens)} tokens a block")
    parts.append(f"engine {document.get('engine', '?')}")
    if document.get("world_size") != 1:
        parts.append(f"{document.get('world_size', '?')} workers")
    if document.get("tenant"):
        parts.append(f"tenant {document['tenant']}")
    if document.get("encryption"):
        parts.append("encrypted")
    if document.get("epoch"):
        parts.append("after a reset")
    return parts


CONFIG_WORDS = {
    "rope_scaling": "rope",
    "rope_parameters": "rope",
    "rope_theta": "rope theta",
    "sliding_window": "window",
    "quantization_config.quant_method": "quantisation",
    "vllm_quantization": "quantisation",
    "quantization": "quantisation",
}
"""Values of a model's configuration that are named -> in which words."""

KIND_NAMES = ("rope_type", "type")
"""What names the kind in a description of rotary embeddings; it stands first."""

NO_WORDS = (None, "", "None", "null")


def _flattened(config: Any) -> dict[str, str]:  # noqa: ANN401  # Any: JSON from a disk
    """Return the values that are named, found at the top or below the section that an engine puts in front."""
    if not isinstance(config, dict):
        return {}
    found: dict[str, str] = {}
    section = "model_config."  # vLLM's
    of_vllm = {name.removeprefix(section): one for name, one in config.items() if name.startswith(section)}
    levels = (config, config.get("model"), config.get("text_config"), of_vllm.get("hf_text_config"), of_vllm)
    for level in levels:
        if not isinstance(level, dict):
            continue
        for name in CONFIG_WORDS:
            value: Any = level  # Any: as above
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value not in NO_WORDS:
                found.setdefault(name, _in_words(value))
    return found


def _in_words(value: Any) -> str:  # noqa: ANN401  # Any: as above
    if isinstance(value, dict):
        kind = [_in_words(value[name]) for name in KIND_NAMES if value.get(name) not in NO_WORDS][:1]
        named = [(name, one) for name, one in value.items() if name not in KIND_NAMES and one not in NO_WORDS]
        return " ".join(kind + [f"{name} {_in_words(one)}" for name, one in sorted(named)])
    return value if isinstance(value, str) else json.dumps(value)


def choose_namespaces(given: Sequence[str], known: Sequence[PlaceNamespace]) -> list[str]:
    """Return the names that the beginnings in ``given`` stand for. Pure.

    Raises:
        ConfigError: one is the beginning of none, or of several.
    """
    chosen = []
    for start in given:
        found = [one.name for one in known if one.name.startswith(start.lower())]
        if len(start) < MIN_PREFIX_CHARS or len(found) != 1:
            names = ", ".join(one.name[:16] for one in known) or "none"
            remedy = (
                f"must be the beginning, {MIN_PREFIX_CHARS} characters at least, of exactly one of {names}"
            )
            raise ConfigError("--namespace", start, remedy, max_value_chars=80)
        chosen += found
    return chosen


@contextmanager
def progress_bar(doing: str, count_bytes: Callable[[], float]) -> Iterator[Progress | None]:
    """Show a bar on stderr while the block runs, where that is a terminal; gives it, or None.

    Args:
        doing: what is done.
        count_bytes: returns the bytes of the whole; called only for a bar.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(doing, total=count_bytes())
        yield progress


def advance(progress: Progress | None, num_bytes: int) -> None:
    """Move the bar."""
    if progress is not None:
        progress.advance(progress.task_ids[0], num_bytes)
