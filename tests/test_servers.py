"""A server that a test has started ends with the tests, however they end."""

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import OTHER_PORTS, free_port

ROOT = Path(__file__).parents[1]
HANG_GUARD_S = 60.0

STARTER = """
import signal, subprocess, sys, threading
from tests.servers import start_bound
said = []
def start():
    waiting = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
    said.append(start_bound(waiting, lambda command: subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(said[0].stdout.readline().strip(), said[0].poll(), said[0].pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv: apt-get install util-linux")
def test_a_server_outlives_the_thread_that_asked_for_it_and_not_the_process() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        greeting, status, pid = starter.stdout.readline().split()
        server = os.pidfd_open(int(pid))
        starter.kill()

    assert (greeting, status) == ("up", "None")
    try:
        assert wait_for_end(server)
    finally:
        os.close(server)


def wait_for_end(pidfd: int) -> bool:
    """Return whether a process ends within the guard."""
    ended, _, _ = select.select([pidfd], [], [], HANG_GUARD_S)
    if not ended:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return bool(ended)


def test_no_port_of_a_server_is_one_that_the_system_hands_out_or_that_another_server_was_given() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    chosen = [free_port() for _ in range(20)]
    taken = [port + above for port in chosen for above in (0, *OTHER_PORTS)]
    assert len(set(taken)) == len(taken)
    if first >= 32_768:  # as Linux has it; some machines hand out lower ones too
        assert not [port for port in taken if first <= port <= last]
