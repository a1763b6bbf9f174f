"""``kvtier llama`` as a program: the server that it starts or finds, the front before it, and their orderly end."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvtier.engines.llamacpp.command_line import (
    ServerCommand,
    find_refusals,
    find_running,
    find_warnings,
    make_command,
)
from kvtier.engines.llamacpp.front import Front
from kvtier.engines.llamacpp.process import ServerProcess
from kvtier.engines.llamacpp.server import LlamaServer
from kvtier.engines.llamacpp.settings import LlamaSettings
from kvtier.errors import ConfigError, LlamaServerError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

DEFAULT_PORT = 8080
"""Where llama-server listens when nothing else is said."""

MAX_BODY_BYTES = 1 << 30
"""Requests with pictures are long; the server has limits of its own."""

CONNECT_S = 5.0
"""Seconds for a connection to the server, which is on this machine as a rule. Answers may take any time."""

UNCHECKED = "--swa-full, --context-shift, --cache-reuse, a draft model, RoPE arguments and control vectors"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        url: of the server.
        host: where the front listens.
        port: the same; 0 takes a free one.
        slot_folder: the server's directory for slot files.
        settings: the front's.
        extra_config: kvtier's.
        command: how the server was started; None where that is not known.
        arguments: what to start it with; empty: it runs already.
        refusals: why nothing can be kept.
        api_key: what the server wants as authorization.
    """

    url: str
    host: str
    port: int
    slot_folder: Path
    settings: LlamaSettings
    extra_config: Mapping[str, Any] = field(repr=False)
    command: ServerCommand | None = None
    arguments: Sequence[str] = ()
    refusals: Sequence[str] = ()
    api_key: str = field(default="", repr=False)


def plan_start(
    arguments: Sequence[str],
    listen: tuple[str, int] | None,
    slot_folder: Path | None,
    settings: LlamaSettings,
    extra_config: Mapping[str, Any],
) -> Plan:
    """Plan to start a server; the front listens where the server would have.

    Raises:
        ConfigError: an argument of the server makes it impossible to keep conversations.
    """
    command = ServerCommand(tuple(arguments), dict(os.environ), Path.cwd(), None)
    refusals = find_refusals(command)
    if refusals:
        raise ConfigError(
            "llama-server", refusals[0].partition(":")[0], "; ".join(refusals), max_value_chars=80
        )
    own = (command.value("--host", "HOST") or LOOPBACK, int(command.value("--port", "PORT") or DEFAULT_PORT))
    host, port = listen or own
    folder = slot_folder or make_slot_folder()
    server_port = find_free_port()
    return Plan(
        f"http://{LOOPBACK}:{server_port}",
        host,
        port,
        folder,
        settings,
        extra_config,
        command,
        make_command(command, folder, LOOPBACK, server_port),
        api_key=find_api_key(command),
    )


def plan_attach(
    url: str,
    listen: tuple[str, int],
    slot_folder: Path | None,
    settings: LlamaSettings,
    extra_config: Mapping[str, Any],
) -> Plan:
    """Plan to stand before a server that runs.

    Raises:
        ConfigError: nothing says where its slot files are.
    """
    command = find_running(url)
    refusals: list[str] = []
    if command is None:
        logger.warning("the server's command line cannot be read, so these are not checked: %s", UNCHECKED)
        if slot_folder is None:
            remedy = "is needed: the directory that llama-server has as --slot-save-path"
            raise ConfigError("--slots", None, remedy)
    else:
        refusals = [*find_refusals(command), *find_warnings(command, slot_folder)]
        slot_path = command.value("--slot-save-path", "SLOT_SAVE_PATH")
        if slot_folder is None:
            slot_folder = command.path(slot_path or "")
    api_key = find_api_key(command) if command is not None else ""
    return Plan(url, *listen, slot_folder, settings, extra_config, command, (), refusals, api_key)


def find_api_key(command: ServerCommand) -> str:
    """Return a key that the server takes; empty where it wants none."""
    keys = command.value("--api-key", "") or command.environ.get("LLAMA_API_KEY", "")
    path = command.value("--api-key-file", "")
    if not keys and path:
        with suppress(OSError):
            keys = ",".join(command.path(path).read_text().split())
    return keys.partition(",")[0]


def make_slot_folder() -> Path:
    """Return a new directory in memory, else in the folder for temporary files."""
    base = Path("/dev/shm")  # noqa: S108 - memory that every Linux has; the name cannot be guessed
    place = base if os.access(base, os.W_OK) else Path(tempfile.gettempdir())
    folder = place / f"kvtier-llama-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    return folder


def find_free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


async def serve(plan: Plan) -> None:
    """Run until SIGTERM or SIGINT, then save what is not stored.

    Raises:
        LlamaServerError: the server cannot be started, or the front cannot listen.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        server = LlamaServer(session, plan.url, plan.api_key)
        front = Front(server, plan.settings, plan.extra_config, plan.command, plan.slot_folder, plan.refusals)
        process = None
        if plan.arguments:
            process = ServerProcess(plan.arguments, front.begin_start, lambda: front.was_ready)
        runner = await _listen(front, plan)
        tasks = [asyncio.create_task(front.run()), asyncio.create_task(_wait_for_signal())]
        if process is not None:
            tasks.append(asyncio.create_task(process.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await runner.cleanup()
            for task in tasks:
                task.cancel()
            await front.close()
            if process is not None:
                await process.close()
                _remove_folder(plan.slot_folder)


async def _listen(front: Front, plan: Plan) -> web.AppRunner:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", front.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, plan.host, plan.port).start()
    except OSError as error:
        await runner.cleanup()
        raise LlamaServerError(f"the front cannot listen on {plan.host}:{plan.port}: {error}") from error
    host, port = runner.addresses[0][:2]
    logger.info("kvtier llama listens on http://%s:%d before %s", host, port, plan.url)
    return runner


async def _wait_for_signal() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()


def _remove_folder(folder: Path) -> None:
    if not folder.name.startswith("kvtier-llama-"):
        return  # the user's
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
