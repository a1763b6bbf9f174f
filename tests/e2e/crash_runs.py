"""Runs demo-like engines, kills each with SIGKILL at an instant of its own, and starts another in its place.

Run as a program: arguments are a directory and a seed; one JSON line comes out for each instant. The libraries are
imported once and every engine lives in a forked child, so that twenty instants take seconds, not minutes. The
parent never computes: a fork must not inherit half of a thread pool.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.cli.demo.conversation import ServedTurn, Turn, plan_conversations
from kvtier.cli.demo.serving import SetUp, config_with, config_without, serve_turns
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY
from kvtier.engines.transformers import KVTierEngine
from kvtier.engines.transformers.local_model import make_random_llama
from kvtier.tiering.fs.system_calls import REAL_CALLS

NUM_CONVERSATIONS, NUM_TURNS, NUM_DOCUMENT_TOKENS = 3, 2, 150
NUM_DEVICE_BLOCKS, CPU_BYTES = 20, 20 * 2 * 64 * 16 * 4

NUM_SHARED_TOKENS = 16
"""The first block holds the heading of a conversation, which is the same at every instant."""


NUM_SURE_CALLS = 6
"""Jobs that a run stores however slow its disk is: the host pool is small, and what it drops before its turn is never
written."""

TIER_CALLS = frozenset({"write", "pwritev", "fallocate", "rename"})
"""Calls of the disk tier, which has its own names for them; others are functions of ``os``."""


@dataclass(frozen=True, slots=True)
class Instant:
    """When a process dies.

    Attributes:
        call: whose call it is; None dies after a share of an undisturbed run.
        number: which call of it, from 1.
        is_after: whether the call has been made.
        share_ratio: when to die without a call.
    """

    call: str | None = None
    number: int = 1
    is_after: bool = False
    share_ratio: float = 0.0

    @property
    def name(self) -> str:
        """What a report calls it."""
        if self.call is None:
            return f"after {self.share_ratio:.2f} of a run"
        order = "after" if self.is_after else "before"
        return f"{order} {self.call} {self.number}"


def choose_instants(draw: random.Random) -> list[Instant]:
    """Return 20 instants: four around the set-up of the region, ten around packs, six anywhere. Pure."""
    set_up = [
        Instant("posix_fallocate"),
        Instant("posix_fallocate", is_after=True),
        Instant("pwrite", is_after=True),
        Instant("unlink"),  # both halves have mapped the region and seal it
    ]
    packs = [Instant("write", draw.randint(1, NUM_SURE_CALLS), is_after) for is_after in (False, True)]
    packs += [Instant("pwritev", draw.randint(1, NUM_SURE_CALLS), draw.random() < 0.5) for _ in range(4)]
    packs += [Instant("fallocate", 2, is_after) for is_after in (False, True)]
    packs += [Instant("rename", 1, is_after) for is_after in (False, True)]
    anywhere = [Instant(share_ratio=draw.uniform(0.0, 0.6)) for _ in range(6)]
    return [*set_up, *packs, *anywhere]


def main(root: Path, seed: int) -> None:
    """Kill one process at each instant, start the next, and report what that found."""
    draw = random.Random(seed)
    started_s = time.monotonic()
    fork(start_next, root, -1).take_answer()
    run_s = time.monotonic() - started_s
    for number, instant in enumerate(choose_instants(draw)):
        victim = fork(die_while_serving, root, number, instant)
        if instant.call is None:
            time.sleep(instant.share_ratio * run_s)
            os.kill(victim.pid, signal.SIGKILL)
        was_killed = victim.take_answer() is None
        left_before = leftovers(root, victim.pid)
        found = fork(start_next, root, number).take_answer()
        report = {
            "instant": instant.name,
            "is_timed": instant.call is None,
            "was_killed": was_killed,
            "left_before": left_before,
            "left_after": leftovers(root, victim.pid),
            "next": found,
        }
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Child:
    """A forked process and what it will say."""

    pid: int
    answer_fd: int

    def take_answer(self) -> object:
        """Wait for the process and return its answer, None when it was killed."""
        with os.fdopen(self.answer_fd) as answer:
            text = answer.read()
        status = os.waitpid(self.pid, 0)[1]
        assert os.WIFSIGNALED(status) or text, "the process failed, see stderr"
        return json.loads(text) if text else None


def fork(work: Callable[..., object], *args: object) -> Child:
    """Do ``work`` in a child, which answers with what it returns."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        return Child(pid, read_fd)
    try:
        torch.set_num_threads(1)
        answer = json.dumps(work(*args))
        os.write(write_fd, answer.encode())
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Whatever happened, the child must not return into the parent's loop.
        os._exit(0)


def plan(number: int) -> list[Turn]:
    """Return the turns of one instant; two instants share no prefix, so that each has blocks to publish."""
    text = random.Random(number).randbytes(400)
    return plan_conversations([text], NUM_CONVERSATIONS, NUM_TURNS, NUM_DOCUMENT_TOKENS)


def set_up(root: Path) -> SetUp:
    """Return sizes that leave most blocks to the tier."""
    tier_settings = {"root_dir": str(root), "capacity_bytes": "1GiB"}
    return SetUp(None, NUM_DEVICE_BLOCKS, CPU_BYTES, "fs", tier_settings)


def serve(root: Path, number: int) -> list[ServedTurn]:
    """Serve one instant's turns with tiers and return what became of them."""
    with KVTierEngine(make_random_llama(1, 256, 1), config_with(set_up(root))) as engine:
        served = serve_turns(engine, plan(number), lambda _: None)
        engine.drain(30.0)
    return served


def die_while_serving(root: Path, number: int, instant: Instant) -> bool:
    """Serve and be killed; True when it was too late for that."""
    if instant.call is not None:
        owner = REAL_CALLS if instant.call in TIER_CALLS else os
        die_at(owner, instant.call, instant.number, is_after=instant.is_after)
    serve(root, number)
    return True


def start_next(root: Path, number: int) -> dict[str, int | bool]:
    """Start an engine as the demo does, serve the same turns, and compare with one that has no tier."""
    with_tiers = serve(root, number)
    with KVTierEngine(make_random_llama(1, 256, 1), config_without(set_up(root))) as engine:
        without = serve_turns(engine, plan(number), lambda _: None)
    is_right = all(one.has_same_answer(other) for one, other in zip(with_tiers, without, strict=True))
    # The first turn of a conversation has nothing to find but what the dead process left in the tier.
    num_found = [one.sources.get("fs", 0) for one in with_tiers if one.turn.number == 1]
    return {
        "is_right": is_right,
        "inherited_tokens": sum(max(0, num - NUM_SHARED_TOKENS) for num in num_found),
    }


def leftovers(root: Path, victim: int) -> list[str]:
    """Return what a dead process left: names in shared memory and temporary files."""
    regions = SHARED_MEMORY_DIRECTORY.glob(f"kvtier_{os.geteuid()}_*-{victim}-*")
    return [str(path) for path in [*regions, *temporaries(root)]]


def temporaries(root: Path) -> Iterator[Path]:
    """Yield what says that the tier's process lives."""
    return root.glob("*.notes")


def die_at(owner: object, name: str, number: int, *, is_after: bool) -> None:
    """Make a call of a function the last thing this process does, in whichever thread."""
    real: Callable[..., object] = getattr(owner, name)
    calls = iter(range(1, sys.maxsize))
    lock = threading.Lock()

    def call(*args: object, **kwargs: object) -> object:
        with lock:
            is_last = next(calls) == number
        if is_last and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    object.__setattr__(owner, name, call) if owner is REAL_CALLS else setattr(owner, name, call)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
