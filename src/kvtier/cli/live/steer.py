"""``kvtier pin``, ``unpin``, ``prefetch`` and ``drain``: what an operator can make a running engine do.

A prefix is given by its token ids, or by its text and the tokenizer of the engine's model. Commands are carried out at
the end of the engine's next step, so an idle engine carries them out with its next request.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.live.overview import InstanceArgument
from kvtier.cli.output import JsonOption, print_json
from kvtier.errors import ConfigError, MissingExtraError
from kvtier.input_files import is_dir, is_file, read_text_file
from kvtier.observe.control_client import EngineConnection, Instance, choose_instance
from kvtier.redaction import shorten

DEFAULT_TIMEOUT_S = 30.0
MAX_PREFIX_BYTES = 2**26
"""The largest file that is read as a prefix."""

TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="FILE", help="The prefix as a JSON list of token ids; - is stdin."),
]
TextOption = Annotated[
    str | None,
    typer.Option("--text", metavar="FILE", help="The prefix as text; - is stdin; needs --tokenizer."),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="The model's folder, or its tokenizer.json, for --text."),
]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", help="Whose prompts they are, where the engine has tenants.")
]
SaltOption = Annotated[
    str | None,
    typer.Option(
        "--salt",
        envvar="KVTIER_CACHE_SALT",
        help="The cache_salt of their requests, where the engine has such.",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option("--adapter", help="The name of their adapter (LoRA), which the engine has served before."),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0.01, max=3600.0, help="Seconds that the engine has for it."),
]


def pin(
    instance_id: InstanceArgument = None,
    tokens: TokensOption = None,
    text: TextOption = None,
    tokenizer: TokenizerOption = None,
    lease_s: Annotated[
        float, typer.Option("--lease", min=1.0, max=86_400.0, help="Seconds for which it is kept.")
    ] = 600.0,
    tenant: TenantOption = None,
    salt: SaltOption = None,
    adapter: AdapterOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Keep the blocks of a prefix in host memory until a lease ends; at most a tenth of host memory is kept so.

    Raises:
        ConfigError: no prefix is given, or it cannot be read.
        ControlError: the engine cannot be reached, made no step in time, or has no room.
    """
    prefix = name_prefix(read_token_ids(tokens, text, tokenizer), tenant, salt, adapter)
    reply = _send("pin", instance_id, timeout_s, lease_s=lease_s, **prefix)
    _report(
        reply,
        f"{reply['num_blocks']} blocks are pinned for {lease_s:g} s, {reply['num_ready']} of them are in host memory; "
        f"{reply['num_pinned']} of at most {reply['limit']} are pinned in all",
        as_json=as_json,
    )


def unpin(
    instance_id: InstanceArgument = None,
    tokens: TokensOption = None,
    text: TextOption = None,
    tokenizer: TokenizerOption = None,
    unpin_all: Annotated[bool, typer.Option("--all", help="End every lease.")] = False,
    tenant: TenantOption = None,
    salt: SaltOption = None,
    adapter: AdapterOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """End the lease of a prefix, or every lease.

    Raises:
        ConfigError: neither a prefix nor --all is given, or the prefix cannot be read.
        ControlError: the engine cannot be reached, or made no step in time.
    """
    if unpin_all:
        reply = _send("unpin", instance_id, timeout_s, all=True)
    else:
        token_ids = read_token_ids(tokens, text, tokenizer, also=", or --all")
        reply = _send("unpin", instance_id, timeout_s, **name_prefix(token_ids, tenant, salt, adapter))
    _report(reply, f"{reply['num_blocks']} leases have ended", as_json=as_json)


def prefetch(
    instance_id: InstanceArgument = None,
    tokens: TokensOption = None,
    text: TextOption = None,
    tokenizer: TokenizerOption = None,
    tenant: TenantOption = None,
    salt: SaltOption = None,
    adapter: AdapterOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Bring the blocks of a prefix from the tiers into host memory, before a request needs them.

    Raises:
        ConfigError: no prefix is given, or it cannot be read.
        ControlError: the engine cannot be reached, or made no step in time.
    """
    prefix = name_prefix(read_token_ids(tokens, text, tokenizer), tenant, salt, adapter)
    reply = _send("prefetch", instance_id, timeout_s, **prefix)
    _report(
        reply,
        f"{reply['num_ready']} of {reply['num_blocks']} blocks are in host memory; the others are in no tier, or there "
        "was no room for them"
        if reply["num_ready"] < reply["num_blocks"]
        else f"all {reply['num_blocks']} blocks are in host memory",
        as_json=as_json,
    )


def drain(
    instance_id: InstanceArgument = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Wait until the tiers have what is pending for them; the exit status is 1 when blocks were lost or still wait.

    Blocks that write-back keeps for their eviction stay where they are.

    Raises:
        ControlError: the engine cannot be reached, made no step in time, or its tiers have not ended in time.
    """
    reply = _send("drain", instance_id, timeout_s)
    num_lost, num_pending = reply.get("num_lost_blocks", 0), reply.get("num_pending_blocks", 0)
    sentences = []
    if num_lost:
        sentences.append(
            f"{num_lost} blocks were lost on their way to a tier since the last drain: the engine's log has a WARNING "
            "with the reason and what to do"
        )
    if num_pending:
        sentences.append(f"{num_pending} blocks wait for a tier that is left out: the log names its failure")
    _report(reply, "; ".join(sentences) or "the tiers have what was pending", as_json=as_json)
    if sentences:
        raise typer.Exit(1)


def purge_living(
    instance_id: str | None,
    tiers: Sequence[str],
    *,
    tenant: str | None = None,
    is_all: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Make a running engine forget blocks that are not in use; ``kvtier purge --instance``.

    Args:
        instance_id: the engine.
        tiers: the tiers to purge, "host" for host memory.
        tenant: only blocks of this tenant of requests, in each tier where ``tiers`` is empty; None: everybody's.
        is_all: purge each tier that can be.
        timeout_s: seconds that the engine has for it.
        as_json: print JSON.

    Raises:
        ConfigError: neither tiers nor all of them are named.
        ControlError: the engine cannot be reached, or made no step in time.
    """
    if (is_all and tiers) or not (is_all or tiers or tenant):
        raise ConfigError("--tier", list(tiers), "say what to purge: --tier host, or --all")
    selector: dict[str, object] = {"tiers": list(tiers)} if tiers else {"all": True}
    if tenant is not None:
        selector["tenant"] = tenant
    reply = _send("purge", instance_id, timeout_s, **selector)
    parts = []
    for tier, num_blocks in reply["num_purged"].items():
        parts.append(f"{num_blocks} blocks of {tier} are purged")
        num_in_use = reply["num_in_use"].get(tier, 0)
        if num_in_use:
            parts.append(f"{num_in_use} of {tier} are in use and stay: purge again when they are not")
    parts += [f"{tier} is not purged: {reason}" for tier, reason in reply["unable"].items()]
    _report(reply, "; ".join(parts), as_json=as_json)


def name_prefix(
    token_ids: Sequence[int], tenant: str | None, salt: str | None, adapter: str | None
) -> dict[str, object]:
    """Return the arguments that name a prefix; what is not given is left out. Pure."""
    named = {"token_ids": token_ids, "tenant": tenant, "cache_salt": salt, "adapter": adapter}
    return {name: value for name, value in named.items() if value is not None}


def read_token_ids(
    tokens: str | None, text: str | None, tokenizer: Path | None, *, also: str = ""
) -> list[int]:
    """Return the token ids of the prefix that a user names.

    Args:
        tokens: a file with a JSON list; "-" is stdin.
        text: a file with text; "-" is stdin.
        tokenizer: for ``text``.
        also: alternative to a prefix, as the end of a sentence.

    Raises:
        ConfigError: it is missing, given twice, or cannot be read.
        MissingExtraError: the library that reads tokenizers is not installed.
    """
    if (tokens is None) == (text is None):
        raise ConfigError(
            "--tokens", tokens, f"give the prefix by --tokens FILE, or by --text FILE --tokenizer{also}"
        )
    if text is not None:
        if tokenizer is None:
            raise ConfigError("--tokenizer", None, "is needed for --text: give the model's folder")
        return _tokenize(_read(text, "--text"), tokenizer)
    content = _read(tokens or "", "--tokens")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError("--tokens", tokens, f"is no JSON: {error}") from error
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise ConfigError("--tokens", tokens, "must hold a JSON list of whole numbers, the token ids")
    return found


def _read(name: str, option: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read(MAX_PREFIX_BYTES)
        return read_text_file(option, Path(name), MAX_PREFIX_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a file, or no text in UTF-8"
        raise ConfigError(option, name, f"cannot be read: {reason}") from error


def _tokenize(text: str, tokenizer: Path) -> list[int]:
    path = tokenizer / "tokenizer.json" if is_dir(tokenizer) else tokenizer
    if not is_file(path):
        raise ConfigError("--tokenizer", str(tokenizer), "has no tokenizer.json: give the model's folder")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("tokenizers", "transformers") from error
    try:
        ids: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    except Exception as error:
        raise ConfigError("--tokenizer", str(path), f"cannot be used: {shorten(error)}") from error
    return ids


def _send(
    command: str, given: str | None, timeout_s: float, **arguments: object
) -> dict[str, Any]:  # Any: JSON
    instance: Instance = choose_instance(given)
    with EngineConnection(instance.path) as connection:
        return {"id": instance.id, **connection.ask(command, timeout_s, **arguments)}


def _report(reply: Mapping[str, Any], text: str, *, as_json: bool) -> None:  # Any: JSON
    if as_json:
        print_json({name: value for name, value in reply.items() if name != "ok"})
    else:
        typer.echo(f"{reply['id']}: {text}")
