"""Writes the table of ``docs/results/trust.md``: each fault and attack that is tried, how often, and what came of it.

    python -m scripts.trust_table                    run each row and write the page; half an hour on two busy cores
    python -m scripts.trust_table --only FIFO        run the rows whose fault has this text, and keep the others
    python -m scripts.trust_table --list             print the commands

A row is made by a suite or a command that the project has anyway. Numbers are what that has printed, or what
``scripts.trust_counts`` has counted around it; a row that was not run, or that failed, says so.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from scripts.trust_counts import FILE_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "trust.md"
BEGIN, END = "<!-- made by scripts.trust_table -->\n", "<!-- end -->\n"
HIDDEN = "<!-- {} -->\n"
"""Carries the numbers of rows in the page, so that one can be run again without the others."""

LIMIT_S = 1800.0

COUNT_NAMES = (
    "cases", "jobs", "blocks", "operations", "kills", "cuts", "engines", "reported",
)  # fmt: skip
"""What a row may count, in the order of the table."""


@dataclass
class Tally:
    """What came of a row.

    Attributes:
        tries: numbers by what was counted.
        wrong: blocks with wrong bytes.
        lost: jobs that were never reported, or blocks that were acknowledged and are not there.
        stuck: requests and lookups without an answer, and processes that fell silent.
        failed: cases that failed for any reason.
        skipped: cases that could not run here.
    """

    tries: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    lost: int = 0
    stuck: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Row:
    """A fault or attack.

    Attributes:
        fault: in words.
        command: what follows ``python -m``.
        read: makes the tally of what the command has printed; None: pytest, which ``trust_counts`` counts.
        recovers: whether its suite fails unless everything works again without help; None where nothing has to.
    """

    fault: str
    command: str
    read: Callable[[str], Tally] | None = None
    recovers: bool | None = None


def read_storm(text: str) -> Tally:
    """Return the tally of a storm. Pure."""
    found = re.search(r"storm: (\d+) operations, .* no law broken", text)
    return Tally({"operations": int(found[1])}) if found else Tally(failed=1)


def read_crash(text: str) -> Tally:
    """Return the tally of ``tests.storm.crash``. Pure."""
    sums = [line for line in text.splitlines() if " kills, " in line]
    if not sums:
        return Tally(failed=1)
    kills, stored, right = (
        int(one.replace(",", "")) for one in re.findall(r"([\d,]+) (?:kills|blocks|loaded)", sums[-1])
    )
    named = {name: int(num) for name, num in re.findall(r"; ([a-z ]+): (\d+)", sums[-1])}
    wrong = named["wrong bytes"] + named["found and never stored"]
    tries = {"kills": kills, "reported": stored, "blocks": right}
    return Tally(tries, wrong, named["acknowledged and not found"], named["starts or calls that failed"])


def read_power_loss(text: str) -> Tally:
    """Return the tally of ``tests.storm.power_loss``; without ``fdatasync`` blocks may be gone. Pure."""
    tally = Tally({"cuts": 0, "reported": 0})
    for durability, *numbers in re.findall(r"\| `\w+` \| `(\w+)` \|[^|]+" + r"\| (\d+) " * 5 + r"\|", text):
        cuts, reported, whole, wrong, refused = map(int, numbers)
        tally.tries["cuts"] += cuts
        tally.tries["reported"] += reported
        tally.wrong += wrong
        tally.stuck += refused
        tally.lost += (reported - whole) if durability == "fdatasync" else 0
    return tally if tally.tries["cuts"] else Tally(skipped=1)


def read_identity(text: str) -> Tally:
    """Return the tally of ``scripts.identity_matrix``: a block of another engine that is found is a wrong one. Pure."""
    found = re.search(r"Of (\d+) rows (\d+) find blocks of the other engine", text)
    return Tally({"engines": int(found[1])}, wrong=int(found[2])) if found else Tally(failed=1)


def read_audit(text: str) -> Tally:
    """Return the tally of ``scripts.audit_run``: a right block that is called wrong is a failure. Pure."""
    found = re.findall(r"\{[^}]*\}", text)
    if not found:
        return Tally(failed=1)
    counts = json.loads(found[-1].replace("'", '"'))  # the last line has the sums
    num_blocks = sum(counts[kind] for kind in ("equal", "close", "wrong"))
    return Tally({"blocks": num_blocks}, failed=counts["wrong"])


def read_counts(counts: Mapping[str, int]) -> Tally:
    """Return the tally of what ``trust_counts`` has counted. Pure."""
    got = {name: counts.get(name, 0) for name in ("passed", "failed", "skipped", "wrong", "lost", "stuck")}
    tries = {
        "cases": got["passed"] + got["failed"],
        "jobs": counts.get("jobs", 0),
        "blocks": counts.get("blocks", 0),
    }
    return Tally(tries, got["wrong"], got["lost"], got["stuck"], got["failed"], got["skipped"])


T = "tests/tiering"
ROWS = (
    Row("fs: the directory is deleted, emptied, replaced, unmounted, read-only, full, or its count unusable",
        f"pytest {T}/fs/test_external_deletions.py {T}/fs/test_outages.py {T}/test_lost_places.py", recovers=True),
    Row("slab: the file is deleted, cut, replaced, zeroed, or a superblock flipped",
        f"pytest {T}/slab/test_lost_file.py {T}/slab/test_superblock_copies.py", recovers=True),
    Row("obj: the store goes away, hangs, comes back; its bucket is emptied",
        f"pytest {T}/obj/test_outage.py {T}/obj/test_chaos.py {T}/kit/test_emptied.py", recovers=True),
    Row("valkey: the server goes away, hangs, is flushed", f"pytest {T}/valkey/test_outage.py", recovers=True),
    Row("mooncake: master and store go away", f"pytest {T}/mooncake/test_outage.py", recovers=True),
    Row("a server that lies: endless, slow, huge, nested replies to a login or a command, maps that cannot be",
        f"pytest {T}/valkey/test_hostile_server.py {T}/valkey/test_resp_deadline.py {T}/obj/test_hostile_server.py"),
    Row("planted under a block's name: FIFO, socket, device, folder, link",
        f"pytest {T}/fs/test_planted_files.py", recovers=True),
    Row("a directory of another user or open to others; a capacity that would empty it",
        f"pytest {T}/fs/test_permissions.py {T}/slab/test_opening.py"),
    Row("flipped, cut, swapped and foreign blocks",
        f"pytest {T}/fs/test_store.py {T}/slab/test_store.py {T}/obj/test_store.py {T}/valkey/test_store.py"),
    Row("a key is dropped: blocks in every tier and backup are unreadable at once", "pytest tests/cli/test_keys.py"),
    Row("encrypted: forged, swapped, moved, put back, other rings, dropped keys",
        f"pytest {T}/fs/test_encrypted.py {T}/slab/test_encrypted.py {T}/obj/test_encrypted.py "
        f"{T}/valkey/test_encrypted.py tests/engines/transformers/test_encryption.py"),
    Row("each system call of fs and slab fails once, moves a part, is the last one",
        f"pytest {T}/fs/test_faulty_calls.py {T}/fs/test_crash.py {T}/slab/test_each_call.py {T}/slab/test_crash.py",
        recovers=True),
    Row("a process is killed while it stores, fs",
        "tests.storm.crash --tier fs --kills 100", read_crash, recovers=True),
    Row("a process is killed while it stores, slab",
        "tests.storm.crash --tier slab --kills 100", read_crash, recovers=True),
    Row("loss of power, with and without fdatasync", "tests.storm.power_loss", read_power_loss, recovers=True),
    Row("storm: every fault at once", "tests.storm --minutes 2", read_storm, recovers=True),
    Row("a forked child uses its parent's tiers", f"pytest {T}/test_forks.py"),
    Row("hostile settings, files and command lines",
        "pytest tests/test_hostile_settings.py tests/cli/test_hostile_input.py"),
    Row("parsers of foreign bytes: corpora and mutations", "pytest tests/fuzz"),
    Row("secrets in errors, logs, numbers, files, replies", "pytest tests/e2e/test_secrets_stay_inside.py"),
    Row("blocks of another engine: a weight, a setting, a version, a tenant is another",
        "scripts.identity_matrix --only ''", read_identity),
    Row("tenants: blocks, quotas and accounts of others",
        "pytest tests/connector/test_tenants.py tests/cpu/test_tenant_quotas.py "
        "tests/tiering/fs/test_tenant_quotas.py tests/tiering/slab/test_tenant_quotas.py "
        "tests/engines/transformers/test_tenants.py"),
    Row("a tenant or a place is purged under a living engine",
        f"pytest tests/engines/transformers/test_tenant_purge.py {T}/test_purging.py", recovers=True),
    Row("the control socket: half lines, huge, binary, nested, odd arguments, floods, other users",
        "pytest tests/observe/test_control_server.py tests/observe/test_control_wire.py "
        "tests/observe/test_control_commands.py"),
    Row("the metrics page: half requests, silence, many connections", "pytest tests/observe/test_prometheus.py"),
    Row("SGLang: its injector's faults, indices that cannot be, pools that raise, removal under it",
        "pytest tests/engines/sglang/test_failures.py tests/engines/sglang/test_pools.py", recovers=True),
    Row("a disk slows to 5 MB/s and recovers: loading stops and begins again",
        "pytest tests/engines/transformers/test_slow_disk.py tests/connector/test_audit.py", recovers=True),
    Row("planted wrong blocks that the audit has to find in a sample of one hit in fifty",
        "pytest tests/connector/test_audit_faults.py tests/engines/transformers/test_audit_faults.py"),
    Row("right blocks that the audit must not call wrong: bfloat16, chunks",
        "scripts.audit_run --engine transformers --dtype bfloat16 --blocks 10000", read_audit),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rows and write the page; return 1 when one of them has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only rows whose fault has this text")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    given = parser.parse_args(arguments)
    tallies = read_page(PAGE.read_text(encoding="utf-8"))
    for row in ROWS:
        if given.list:
            print(f"python -m {row.command}")
        elif given.only.lower() in row.fault.lower():
            tallies[row.fault] = run_row(row)
            print(render_row(row, tallies[row.fault]), flush=True)
            PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), tallies), encoding="utf-8")
    return int(any(has_finding(tally) for tally in tallies.values()))


def run_row(row: Row) -> Tally:
    """Run the command of a row and return what came of it."""
    module, _, rest = row.command.partition(" ")
    command = [sys.executable, "-m", module, *(word.strip("'") for word in rest.split())]
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        if row.read is None:
            command += ["-q", "-p", "scripts.trust_counts", "-p", "no:cacheprovider"]
        paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        environment = {"OMP_NUM_THREADS": "1", **os.environ, FILE_VARIABLE: str(counts), "PYTHONPATH": paths}
        try:
            done = subprocess.run(  # noqa: S603 - our own commands
                command,
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
                env=environment,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Tally(stuck=1, failed=1)
        tally = row.read(done.stdout) if row.read else Tally()
        if row.read is None and counts.exists():
            tally = read_counts(json.loads(counts.read_text()))
    if row.read is None and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        tally.skipped = 1  # what its files need is not installed
    if done.returncode and not has_finding(tally) and not tally.skipped:
        tally.failed = 1
    if has_finding(tally):
        print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
    return tally


def has_finding(tally: Tally) -> bool:
    """Return whether anything is not as it must be. Pure."""
    return any((tally.wrong, tally.lost, tally.stuck, tally.failed))


def render_row(row: Row, tally: Tally | None) -> str:
    """Return a line of the table. Pure."""
    command = f"`python -m {row.command}`"
    num_tried = sum(tally.tries.values()) if tally else 0
    if tally is None or (not num_tried and not has_finding(tally)):
        return f"| {row.fault} | not run here | | | | | {command} |"
    tries = ", ".join(f"{tally.tries[name]:,} {name}" for name in COUNT_NAMES if tally.tries.get(name))
    if tally.skipped:
        tries += f" ({tally.skipped:,} skipped)"
    recovered = "" if row.recovers is None else "yes" if not has_finding(tally) else "**no**"
    wrong = f"{tally.wrong:,}" if not tally.failed or tally.wrong else f"**{tally.failed} failed**"
    return f"| {row.fault} | {tries} | {wrong} | {tally.lost:,} | {tally.stuck:,} | {recovered} | {command} |"


HEAD = (
    "| fault or attack | tries | wrong bytes | lost jobs | stuck requests | recovered by itself | command |\n"
    "|---|---|---:|---:|---:|---|---|\n"
)


def write_page(page: str, tallies: Mapping[str, Tally]) -> str:
    """Return the page with the table of these rows between its marks. Pure."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    kept = {row.fault: asdict(tallies[row.fault]) for row in ROWS if row.fault in tallies}
    lines = "\n".join(render_row(row, tallies.get(row.fault)) for row in ROWS)
    return f"{before}{BEGIN}{HIDDEN.format(json.dumps(kept))}\n{HEAD}{lines}\n\n{END}{after}"


def read_page(page: str) -> dict[str, Tally]:
    """Return the rows that a page has. Pure."""
    found = re.search(re.escape(BEGIN) + r"<!-- (\{.*\}) -->\n", page)
    return {fault: Tally(**tally) for fault, tally in json.loads(found[1]).items()} if found else {}


if __name__ == "__main__":
    sys.exit(main())
