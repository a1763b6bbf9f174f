"""What makes a model's conversations its own, and whether the server behind a URL still has that model.

The identity is the bytes of the weights, of adapters with their scales and of every other file that is named, each
argument that is not known to be harmless, the build, and the layout of the self-test's slot file. What cannot be read
is refused: conversations would otherwise be found by a server that computes others.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.engines.checkpoint import FileStamp, fingerprint_checkpoint
from kvtier.engines.checkpoint.files import stamp_of
from kvtier.engines.llamacpp.blocks import BlockFormat
from kvtier.engines.llamacpp.command_line import ServerCommand, find_parts, name_arguments
from kvtier.engines.llamacpp.gguf_header import depends_on_length, find_window, read_header
from kvtier.engines.llamacpp.record_store import plan_row_bytes
from kvtier.engines.llamacpp.server import LlamaServer
from kvtier.errors import LlamaServerError

ENGINE_KIND = "llamacpp"

UNNAMED_BUILDS = ("unknown", "b0-")
"""What stands in the name of a build that does not say which one it is."""

Props = tuple[str, str, int, int]
"""Build, path of the model, number of slots and tokens of each, as the server gives them."""


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The model that a server has loaded.

    Attributes:
        alias: its name for people.
        weights: digest of its bytes.
        words: what else decides keys and values.
        window_tokens: tokens of its sliding windows; None where it has none.
        props: what the server said of itself.
        adapters: path and scale of each LoRA that is in use.
        stamps: the state of each file that was read.
    """

    alias: str
    weights: str
    words: Mapping[str, object]
    window_tokens: int | None
    props: Props
    adapters: tuple[tuple[str, float], ...]
    stamps: tuple[tuple[Path, FileStamp], ...]

    @property
    def num_slots(self) -> int:
        """Slots of the server."""
        return self.props[2]

    @property
    def num_slot_tokens(self) -> int:
        """Tokens of a slot."""
        return self.props[3]

    def make_config(self, form: BlockFormat, extra_config: Mapping[str, Any]) -> OffloadingConfig:
        """Return the configuration under which the conversations are kept.

        Args:
            form: how they are cut.
            extra_config: the user's settings.
        """
        row_bytes, size, layout = plan_row_bytes(form), form.block_tokens, form.layout
        rows, windows = _name_layers("rows", layout.attention), _name_layers("window", layout.window)
        window_tokens = form.window_tokens or size
        groups = (
            KVGroup(size, rows, row_bytes),
            KVGroup(size, windows, row_bytes, kind=GroupKind.WINDOW, window_tokens=window_tokens),
            KVGroup(size, ("ends",), row_bytes, kind=GroupKind.STATE),
        )
        words = json.dumps(self.words, sort_keys=True)
        return OffloadingConfig(
            f"{ENGINE_KIND}-{os.getpid()}",
            ModelIdentity(
                self.alias,
                config_digest=hashlib.sha256(words.encode()).hexdigest(),
                config_json=words,
                weights=self.weights,
            ),
            groups,
            hash_block_size=size,
            kv_layout=hashlib.sha256(repr((form.layout, form.window_tokens)).encode()).hexdigest(),
            engine_kind=ENGINE_KIND,
            extra_config=extra_config,
        )


def _name_layers(kind: str, layout: object) -> tuple[str, ...]:
    return tuple(f"{kind} {n}" for n in range(len(getattr(layout, "keys", ())))) or (f"no {kind}",)


async def read_identity(
    server: LlamaServer, command: ServerCommand | None, model: Path | None
) -> ServerIdentity:
    """Find out what a server has loaded; takes as long as reading the weights, once.

    Args:
        server: that has loaded it.
        command: how it was started; None where that is not known.
        model: the file of the weights; None: where the server says it is.

    Raises:
        LlamaServerError: the server does not answer, or the model is not on this machine.
        FingerprintError: a file cannot be read.
    """
    props, adapters = await read_props(server), await read_adapters(server)
    path = model or (Path(props[1]) if command is None else command.path(props[1]))
    if not path.is_file():
        raise LlamaServerError(
            f"{path} is not on this machine: give --model FILE, the weights that the server loads"
        )
    alias = (command and command.value("--alias", "ALIAS")) or path.name
    return await asyncio.to_thread(_read_files, alias, path, command, props, adapters)


async def is_unchanged(server: LlamaServer, identity: ServerIdentity) -> bool:
    """Return whether the server still has the model of an identity, with the same adapters, from the same files."""
    if await read_props(server) != identity.props or await read_adapters(server) != identity.adapters:
        return False
    try:
        return all(stamp_of(path.stat()) == stamp for path, stamp in identity.stamps)
    except OSError:
        return False


async def read_props(server: LlamaServer) -> Props:
    """Return what a server says of itself.

    Raises:
        LlamaServerError: it does not answer, or is no llama-server.
    """
    props = await server.call("GET", "/props")
    try:
        settings = props.get("default_generation_settings") or {}
        found = str(props["build_info"]), str(props["model_path"]), int(props["total_slots"])
        return (*found, int(settings.get("n_ctx") or 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LlamaServerError(
            f"its /props lack {error}: it is no llama-server, or one of another age"
        ) from error


async def read_adapters(server: LlamaServer) -> tuple[tuple[str, float], ...]:
    """Return path and scale of each LoRA that is in use."""
    found = await server.call("GET", "/lora-adapters")
    return tuple((str(one["path"]), float(one["scale"])) for one in found if float(one["scale"]))


def _read_files(
    alias: str,
    path: Path,
    command: ServerCommand | None,
    props: Props,
    adapters: tuple[tuple[str, float], ...],
) -> ServerIdentity:
    files = _NamedFiles()
    weights = " ".join(files.name(part) for part in find_parts(path))
    folder = command.folder if command is not None else Path()
    words: dict[str, object] = {
        "build": props[0],
        "adapters": [[files.name(folder / one), scale] for one, scale in adapters],
        "arguments": {}
        if command is None
        else {
            name: [files.name_values(command, value) for value in values]
            for name, values in name_arguments(command).items()
        },
    }
    if depends_on_length(path):
        words["n_ctx"] = props[3]
    if any(text in props[0] for text in UNNAMED_BUILDS) and command is not None and command.executable:
        words["executable"] = files.name(command.executable)
    window_tokens = find_window(read_header(path))
    return ServerIdentity(alias, weights, words, window_tokens, props, adapters, tuple(files.stamps))


class _NamedFiles:
    """Names files by their bytes, and keeps the state in which they were read."""

    def __init__(self) -> None:
        self.stamps: list[tuple[Path, FileStamp]] = []

    def name(self, path: Path) -> str:
        try:
            self.stamps.append((path, stamp_of(path.stat())))
            # Weights under another ending, as some programs store them, have no cached digest.
            if path.suffix == ".gguf":
                return fingerprint_checkpoint(path).text
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise LlamaServerError(
                f"{path} cannot be read, so nothing says which keys and values are its: {error}"
            ) from error

    def name_values(self, command: ServerCommand, value: str) -> str:
        """Return a value with each file in it named by its bytes; a scale may follow a file, and a comma another."""
        named = []
        for part in value.split(","):
            text, colon, scale = part.rpartition(":")
            path = command.path(text if colon and not command.path(part).is_file() else part)
            named.append(f"{self.name(path)}{colon}{scale}" if part and path.is_file() else part)
        return ",".join(named)
