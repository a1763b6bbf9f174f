"""Two hosts on one machine: network namespaces that reach each other over a cable.

Where those are not allowed, they are two processes that share the loopback interface.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.203.0"


@dataclass(frozen=True, slots=True)
class Host:
    """Where processes run.

    Attributes:
        address: of the host, for the other one.
        prefix: what stands before a command to run it there.
    """

    address: str
    prefix: tuple[str, ...] = ()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts, and remove what was made for them."""
    names = [f"kvtier-{os.getpid()}-{letter}" for letter in "ab"]
    ip = shutil.which("ip")
    try:
        if ip is not None and is_isolation_possible(ip, names):
            yield tuple_of_hosts(ip, names)
        else:
            yield Host("127.0.0.1"), Host("127.0.0.1")
    finally:
        if ip is not None:
            for name in names:
                subprocess.run([ip, "netns", "delete", name], capture_output=True, check=False)


def is_isolation_possible(ip: str, names: list[str]) -> bool:
    """Make the namespaces and the cable between them; False when the system refuses."""
    commands = [f"netns add {name}" for name in names]
    ends = [f"kv{os.getpid()}{letter}" for letter in "ab"]
    commands.append(f"link add {ends[0]} type veth peer name {ends[1]}")
    for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
        commands += [
            f"link set {end} netns {name}",
            f"-n {name} addr add {NETWORK}.{number}/24 dev {end}",
            f"-n {name} link set {end} up",
            f"-n {name} link set lo up",
        ]
    return all(
        subprocess.run([ip, *command.split()], capture_output=True, check=False).returncode == 0
        for command in commands
    )


def tuple_of_hosts(ip: str, names: list[str]) -> tuple[Host, Host]:
    """Return the hosts of two namespaces."""
    first, second = names
    enter = (ip, "netns", "exec")
    return Host(f"{NETWORK}.1", (*enter, first)), Host(f"{NETWORK}.2", (*enter, second))
