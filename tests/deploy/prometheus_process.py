"""A real Prometheus as a process on loopback, and promtool."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import yaml
from tests.ports import free_port
from tests.servers import start_bound

REMEDY = "needs Prometheus: apt-get install prometheus"

START_TIMEOUT_S = 60.0
"""Guard against a hang; a start takes a second."""

DATA_TIMEOUT_S = 120.0
"""Guard against a hang; data are there after a few scrapes."""

POLL_S = 0.2

SCRAPE_INTERVAL_S = 1


def find_program(name: str) -> str:
    """Return the path of a program of Prometheus; skips the test without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(REMEDY)
    return found


def run_promtool(*arguments: str) -> str:
    """Run promtool and return what it printed.

    Raises:
        AssertionError: it has failed; the message is what it printed.
    """
    ended = subprocess.run(
        [find_program("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


class PrometheusProcess:
    """Scrapes addresses of this machine when entered, and ends when left, by its process id.

    Args:
        folder: an empty folder for its data.
        targets: the pages to scrape, host and port of each, by job.
        rules: files with alerts.
    """

    def __init__(self, folder: Path, targets: Mapping[str, str], rules: Sequence[Path] = ()) -> None:
        self._program = find_program("prometheus")
        self._folder = folder
        self._config = folder / "prometheus.yml"
        jobs = [{"job_name": job, "static_configs": [{"targets": [place]}]} for job, place in targets.items()]
        interval = f"{SCRAPE_INTERVAL_S}s"
        document = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "rule_files": [str(rule.resolve()) for rule in rules],
            "scrape_configs": jobs,
        }
        self._config.write_text(yaml.safe_dump(document))

    def __enter__(self) -> "PrometheusProcess":
        self._port = free_port()
        self._log = (self._folder / "log").open("wb")
        command = [
            self._program,
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        self._process: subprocess.Popen[bytes] = start_bound(
            command, lambda bound: subprocess.Popen(bound, stdout=self._log, stderr=subprocess.STDOUT)
        )
        end_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end_s:
                self._stop()
                raise AssertionError((self._folder / "log").read_text(errors="replace")[-3000:])
            time.sleep(POLL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def ask(self, expression: str) -> list[dict[str, Any]]:  # Any: JSON
        """Return the series that an expression has now.

        Raises:
            AssertionError: Prometheus refuses it; the message has its reason.
        """
        try:
            answer = self._get("/api/v1/query", query=expression)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        found: list[dict[str, Any]] = answer["data"]["result"]  # Any: as above
        return found

    def ask_range(
        self, expression: str, begin_s: float, end_s: float, step_s: float
    ) -> list[dict[str, Any]]:  # Any: JSON
        """Return the series that an expression had between two times, seconds since 1970."""
        arguments = {"start": f"{begin_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        answer = self._get("/api/v1/query_range", query=expression, **arguments)
        found: list[dict[str, Any]] = answer["data"]["result"]  # Any: as above
        return found

    def ask_until_known(self, expressions: Sequence[str]) -> list[str]:
        """Ask until each expression has had data; return those that had none in the end."""
        end_s = time.monotonic() + DATA_TIMEOUT_S
        missing = list(expressions)
        while missing and time.monotonic() < end_s:
            missing = [expression for expression in missing if not self.ask(expression)]
            time.sleep(POLL_S if missing else 0)
        return missing

    def alerts(self) -> list[dict[str, Any]]:  # Any: JSON
        """Return the alerts that are pending or fire."""
        found: list[dict[str, Any]] = self._get("/api/v1/alerts")["data"]["alerts"]
        return found

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=10):
                return True
        except OSError:
            return False

    def _get(self, path: str, **arguments: str) -> dict[str, Any]:  # Any: JSON
        url = f"http://127.0.0.1:{self._port}{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
