"""What separates an engine from the blocks that its tiers hold, before it starts.

Of an engine that has not started only a part of its identity is known: what its settings say; with ``--vllm`` also the
model, its configuration and the engine's sizes; with ``--engine`` all of it, from the ``namespace.json`` of an engine
that ran. That part is compared with the same part of each namespace's document. What is not known is not compared, and
the finding says so.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.cli.output import Check, CheckResult
from kvtier.cli.place.options import counted, printable, read_document
from kvtier.config import Settings
from kvtier.errors import ConfigError, KVTierError, NamespaceDocumentError
from kvtier.input_files import read_text_file
from kvtier.namespace import (
    LAYOUT_VERSION,
    Difference,
    Document,
    differences,
    is_older_layout,
    parse_document,
    tag_tenant,
)
from kvtier.tiering.kit.place import Place, PlaceNamespace

MAX_SHOWN = 6
"""Fields that are named; an engine of another model differs in dozens."""

ENCRYPTION = "encryption"
TENANT = "tenant"
BLOCK_TOKENS = "block_size"
"""What a document says of the size of blocks, in tokens, under the name of the setting."""


@dataclass(frozen=True, slots=True)
class KnownIdentity:
    """What is known of an engine's identity before its start.

    Attributes:
        document: as in a namespace's document, without what is not known.
        is_whole: whether nothing is missing.
    """

    document: Document
    is_whole: bool = False


def of_settings(settings: Settings) -> KnownIdentity:
    """Return what an engine's settings say of its identity. Pure, but takes a tenth of a second with a salt."""
    known: dict[str, Any] = {"layout_version": LAYOUT_VERSION, TENANT: tag_tenant(settings.tenant_salt)}
    known["epoch"] = ""
    if settings.block_size is not None:
        known[BLOCK_TOKENS] = settings.block_size
    return KnownIdentity(known)


def of_document(path: Path) -> KnownIdentity:
    """Return the identity of an engine that ran, from the ``namespace.json`` that it wrote.

    Raises:
        ConfigError: the file is none, or of another layout.
    """
    text = read_text_file("--engine", path)
    try:
        document = parse_document(text)
    except NamespaceDocumentError as error:
        raise ConfigError(
            "--engine", str(path), f"must be the namespace.json of a tier: {error.reason}"
        ) from None
    if document["layout_version"] != LAYOUT_VERSION:
        remedy = f"is of layout {document['layout_version']}, and this kvtier uses {LAYOUT_VERSION}"
        raise ConfigError("--engine", str(path), remedy)
    # A new start has the identity of before any reset.
    return KnownIdentity({**document, "epoch": ""}, is_whole=True)


def check_namespaces(
    subject: str, place: Place, known: KnownIdentity, *, is_encrypting: bool
) -> Iterator[Check]:
    """Yield what separates an engine from the namespaces of one place.

    Args:
        subject: the tier.
        place: where its blocks are.
        known: the engine.
        is_encrypting: whether it encrypts what it stores there.
    """
    documents = {one: found for one in place.namespaces() if (found := read_document(one)) is not None}
    older = [one for one, document in documents.items() if is_older_layout(document)]
    if older:
        # Of a URL more may be needed than it says: a prefix, an endpoint, a password.
        where = shlex.quote(place.where) if place.where.startswith("/") else "PLACE"
        has = "is" if len(older) == 1 else "are"
        said = f"{counted(len(older), 'namespace')} {has} of an older layout and not readable: "
        yield Check(subject, CheckResult.NOTE, f"{said}kvtier purge {where} --older-layouts")
    readable = {one: found for one, found in documents.items() if found["layout_version"] == LAYOUT_VERSION}
    compared = [(compare(known.document, found, is_encrypting), one) for one, found in readable.items()]
    if compared:
        separating, nearest = min(compared, key=lambda pair: (len(pair[0]), pair[1].name))
        yield describe_nearest(subject, nearest, separating, known)


def compare(known: Document, document: Document, is_encrypting: bool) -> list[Difference]:
    """Return the fields in which an engine differs from a namespace, of those that are known of it. Pure."""
    own = {name: value for name, value in known.items() if name != ENCRYPTION}
    other = {name: document[name] for name in own if name in document}
    if ENCRYPTION in document or is_encrypting:
        # Nothing in the document of encrypted blocks is made from a salt.
        own.pop(TENANT, None), other.pop(TENANT, None)
    if is_encrypting:
        own[ENCRYPTION] = "AES-256-GCM"
    if ENCRYPTION in document:
        other[ENCRYPTION] = document[ENCRYPTION]
    if BLOCK_TOKENS in own:
        other[BLOCK_TOKENS] = _block_tokens(document)
    return differences(json.dumps(own), json.dumps(other))


def describe_nearest(
    subject: str, nearest: PlaceNamespace, separating: Sequence[Difference], known: KnownIdentity
) -> Check:
    """Return what is said of the namespace that differs least. Pure."""
    name = nearest.name[:8]
    what = "" if known.is_whole else f" of what is known before a start ({_parts(known.document)})"
    hint = "" if known.is_whole or "model" in known.document else "; --vllm or --engine compare the model too"
    if not separating:
        return Check(subject, CheckResult.GOOD, f"namespace {name} is equal in all{what or ' fields'}{hint}")
    fields = [f"{one.field} {one.value_b} (here {one.value_a})" for one in separating[:MAX_SHOWN]]
    if len(separating) > MAX_SHOWN:
        fields.append(counted(len(separating) - MAX_SHOWN, "field") + " more")
    found = f"none of its blocks will be found; the nearest namespace, {name}, differs in {', '.join(fields)}"
    return Check(subject, CheckResult.NOTE, printable(found + hint))


def read_identity(
    settings: Settings, engine: Path | None, vllm: str | None, extra: Mapping[str, Any]
) -> KnownIdentity:  # Any: JSON of the user
    """Return what is known of an engine, from what the command was given.

    Args:
        settings: of the engine.
        engine: the ``namespace.json`` of an engine that ran.
        vllm: arguments of vLLM, the model first.
        extra: the settings as the user wrote them.

    Raises:
        KVTierError: the file or the arguments cannot be used.
    """
    if engine is not None and vllm is not None:
        raise ConfigError("--vllm", vllm, "goes with no --engine: both say which engine is meant")
    if engine is not None:
        return of_document(engine)
    known = of_settings(settings)
    if vllm is None:
        return known
    # It logs to stdout otherwise, where --json prints.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        from kvtier.engines.vllm.before_start import identify
    except KVTierError as error:
        raise ConfigError("--vllm", vllm, f"needs vLLM in this environment: {error}") from error
    return KnownIdentity({**known.document, **identify(vllm, extra)})


def _block_tokens(document: Document) -> object:
    groups, factor = document.get("groups"), document.get("block_size_factor")
    if not isinstance(groups, list) or not isinstance(factor, int):
        return None
    sizes = [one.get("block_size_tokens") for one in groups if isinstance(one, dict)]
    return next((size * factor for size in sizes if isinstance(size, int)), None)


def _parts(document: Document) -> str:
    return ", ".join(sorted({"layout_version": "layout"}.get(name, name) for name in document))
