"""``kvtier llama``: a front before llama-server that keeps the KV of its conversations."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.config import MAX_PORT
from kvtier.engines.llamacpp.serve import Plan, plan_attach, plan_start, serve
from kvtier.engines.llamacpp.settings import LlamaSettings
from kvtier.errors import ConfigError
from kvtier.input_files import read_text_file
from kvtier.settings import parse_settings

DEFAULT_MEMORY = "1GiB"
DEFAULT_CAPACITY = "16GiB"
DEFAULT_ATTACH_LISTEN = "127.0.0.1:8081"

SECTION = "llama"
"""The part of the configuration file that has the front's own settings."""


def llama(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- llama-server ...", help="The server to start, with its arguments."),
    ] = None,
    attach: Annotated[
        str | None, typer.Option("--attach", metavar="URL", help="Stand before a server that runs instead.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Where the front listens; default: where the server would, with --attach {DEFAULT_ATTACH_LISTEN}.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where conversations are stored; default: ~/.cache/kvtier/llama."),
    ] = None,
    capacity: Annotated[str, typer.Option(help="How much may be stored there.")] = DEFAULT_CAPACITY,
    memory: Annotated[str, typer.Option(help="Host memory in front of it.")] = DEFAULT_MEMORY,
    slots: Annotated[
        Path | None,
        typer.Option(help="Directory for slot files, as --slot-save-path has it; default: one in memory."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="JSON file with kvtier's settings, in place of --dir, --capacity and --memory."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the log as JSON, one object a line.")
    ] = False,
) -> None:
    """Keep the conversations of a llama-server: chats share what they begin with, over restarts and model swaps.

    Raises:
        ConfigError: neither or both of a command and --attach are given, or a setting cannot work.
        LlamaServerError: the server cannot be started.
    """
    if bool(command) == bool(attach):
        remedy = (
            "give a server to start, kvtier llama -- llama-server -m MODEL, or --attach URL of one that runs"
        )
        raise ConfigError("COMMAND", " ".join(command or ()), remedy, max_value_chars=80)
    begin_log(as_json=as_json)
    settings, extra_config = read_config(config, folder, capacity, memory)
    if attach:
        address = parse_address(listen or DEFAULT_ATTACH_LISTEN)
        plan: Plan = plan_attach(attach.rstrip("/"), address, slots, settings, extra_config)
    else:
        address_or_none = None if listen is None else parse_address(listen)
        plan = plan_start(command or (), address_or_none, slots, settings, extra_config)
    asyncio.run(serve(plan))


class JsonFormatter(logging.Formatter):
    """Writes a line of the log as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage()}
        return json.dumps(fields)


def begin_log(*, as_json: bool) -> None:
    """Have the log written to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def read_config(
    config: Path | None, folder: Path | None, capacity: str, memory: str
) -> tuple[LlamaSettings, dict[str, Any]]:
    """Return the front's settings and kvtier's.

    Raises:
        ConfigError: the file cannot be read, or has no JSON object.
    """
    if config is None:
        place = (folder or default_folder()).expanduser().resolve()
        tier = {"type": "fs", "root_dir": str(place), "capacity_bytes": capacity}
        return LlamaSettings(), {"cpu_bytes_to_use": memory, "secondary_tiers": [tier]}
    try:
        values = json.loads(read_text_file("--config", config))
    except (ValueError, RecursionError) as error:
        raise ConfigError("--config", str(config), f"is no JSON: {error}", max_value_chars=80) from error
    if not isinstance(values, dict) or not isinstance(values.get(SECTION, {}), dict):
        remedy = f"must be a JSON object with kvtier's settings, and the front's own in \"{SECTION}\""
        raise ConfigError("--config", str(config), remedy, max_value_chars=80)
    own = values.pop(SECTION, {})
    return parse_settings(LlamaSettings, own, SECTION), {"cpu_bytes_to_use": memory, **values}


def default_folder() -> Path:
    """Return where conversations are stored: in $XDG_CACHE_HOME/kvtier/llama, else ~/.cache/kvtier/llama."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvtier" / "llama"


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        ConfigError: it is no HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError("--listen", text, "must be HOST:PORT, such as 127.0.0.1:8081", max_value_chars=80)
    return host.strip("[]"), int(port)
