"""Write docs/guide/ten-questions.md: ten questions of an operator, each answered by one command on a real engine.

    python -m scripts.ten_questions          starts an engine, gives each command and rewrites the page

A test gives each command to an engine of its own and looks for what the page says it shows.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.engines.transformers import KVTierEngine
from kvtier.namespace import tag_tenant
from scripts.small_engine import ROW_BYTES, WAIT_S, prompt_of, running_engine

ROOT = Path(__file__).parents[1]

PAGE = ROOT / "docs" / "guide" / "ten-questions.md"

TENANT_SALT = "drawn at random"
"""Of a second engine that shares the directory."""

INSTANCE_ID = "chat"
"""The engine's, on the page; a test gives its own, which no other engine of the machine has."""

NUM_PROMPTS = 10
NUM_ROUNDS = 3
METRICS_PORT = 9464

STEP_INTERVAL_S = 0.01
"""Between two steps of the engine while a command runs: what the command asks for is carried out in one."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an operator wants to know.

    Attributes:
        text: the question.
        command: what answers it, as typed; ``FOLDER`` stands for where the engine keeps everything, ``TENANT`` for the
            tenant's tag.
        shows: texts that the answer has.
        reading: how to read it, and where to go on.
        status: the command's exit status.
    """

    text: str
    command: str
    shows: Sequence[str]
    reading: str
    status: int = 0


QUESTIONS = (
    Question(
        "Why are there no hits?",
        "kvtier why chat",
        ("never_seen", "requests of engine chat"),
        "Each prompt token counts once: as found in one place, or as computed for one cause. The command "
        "says what to do about the three largest causes; [troubleshooting](troubleshooting.md) covers all "
        "causes.",
    ),
    Question(
        "How full is it?",
        "kvtier ps",
        ("100 % full", "fs 4", " % full", "chat"),
        "Full host memory is normal. A tier that is left out is marked here. `kvtier top chat` shows the "
        "same continuously.",
    ),
    Question(
        "How old are the blocks?",
        "kvtier inspect FOLDER/fs",
        ("blocks by last use: ", "within an hour", "last used"),
        "To remove blocks that have not been used for a week, run `kvtier purge PLACE --older-than 7d`; "
        "with `--dry-run` it only counts them.",
    ),
    Question(
        "Which tenant holds what?",
        "kvtier inspect FOLDER/fs | grep tenant",
        ("no tenant: 40 blocks", "tenant TENANT: 8 blocks"),
        "`--json` has the same by namespace. Tenants of one engine (the setting "
        "[`tenants`](tenants.md#counting-and-purging)) are counted by number, or by name with `--config "
        "FILE`. This prints the tag for a `tenant_salt`: `python -c 'from kvtier.namespace import "
        "tag_tenant; print(tag_tenant(input()))'`.",
    ),
    Question(
        "How do I delete what a tenant has?",
        "kvtier purge FOLDER/fs --tenant TENANT",
        ("removed 8 blocks",),
        "Engines that use the directory continue and see misses. `kvtier purge --instance ID --all` also "
        "removes the blocks in the host memory of that tenant's engine. `--tenant` also takes the name of "
        "a [tenant of one engine](tenants.md#counting-and-purging); `kvtier purge --instance ID --tenant "
        "NAME` removes its blocks from that engine.",
    ),
    Question(
        "Is the disk healthy?",
        "kvtier verify FOLDER/fs --max-duration 10m",
        ("40 whole",),
        "The command compares every block that it reads with its checksum. Exit status 1 means that a "
        "block is damaged; `--delete` removes damaged blocks.",
    ),
    Question(
        "What would more memory bring?",
        "kvtier simulate FOLDER/trace --kv-bytes-per-token 512 --device 32KiB --sweep "
        "host=32KiB,64KiB,128KiB,256KiB --prefill 500",
        ("host memory", "fewer prompt tokens", "256KiB"),
        "The trace is a recording of this engine ([record](record.md)). `kvtier size MODEL` prints the "
        "value for `--kv-bytes-per-token`; `--prefill` is the number of prompt tokens that your engine "
        "computes in a second.",
    ),
    Question(
        "Is it worth it?",
        "kvtier simulate FOLDER/trace --kv-bytes-per-token 512 --device 32KiB --host 256KiB --prefill 500",
        ("fewer prompt tokens", "less for their first tokens"),
        "The last lines show how many seconds less all requests together wait for their first tokens than "
        "with the same engine without kvtier.",
    ),
    Question(
        "What happens at an upgrade?",
        "kvtier doctor --dir FOLDER/fs",
        ("formats", "block header", "namespace"),
        "Run it with both versions: if the format numbers are equal, the new version finds the blocks of "
        "the old one. [Upgrading](upgrading.md) says what else must stay equal, and `kvtier verify` of "
        "the new version counts the blocks that it cannot read.",
    ),
    Question(
        "Where do I alert?",
        "grep -h -E '^ +- alert:|summary:' deploy/prometheus/alerts.yml",
        ("KVTierBreakerOpen", "KVTierDamagedBlocks"),
        "Load that file into Prometheus, and scrape the address in the last column of `kvtier ps`. "
        "[Monitoring](monitoring.md#what-to-alert-on) says what each alert means and what to do.",
    ),
)


def main() -> int:
    """Rewrite the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_RUNTIME_DIR"] = name  # no other engine of this user is on the page
        with serving(folder, metrics_port=METRICS_PORT) as engine:
            answers = [answer(question, folder, engine) for question in QUESTIONS]
    for question, (status, shown) in zip(QUESTIONS, answers, strict=True):
        assert status == question.status, shown
    PAGE.write_text(make_page(answers), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(QUESTIONS)} questions")
    return 0


@contextmanager
def serving(folder: Path, instance_id: str = INSTANCE_ID, **more: object) -> Iterator[KVTierEngine]:
    """Yield an engine that has served prompts several times from an fs tier, which a tenant's engine has used too."""
    tier = {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "64MiB"}
    shared: dict[str, object] = {"cpu_bytes_to_use": 8 * ROW_BYTES, "secondary_tiers": [tier]}
    own = {**shared, "record_trace": "", "tenant_salt": TENANT_SALT, "control_socket": False}
    with running_engine(folder, **own) as engine:
        # Again, as below: what a busy disk declined the first time is stored now.
        for _ in range(NUM_ROUNDS):
            for seed in (100, 101):
                engine.run(prompt_of(seed), 1)
                assert engine.drain(WAIT_S).has_ended
            engine.drop_device_cache()
    with running_engine(folder, **shared, instance_id=instance_id, **more) as engine:
        for _ in range(NUM_ROUNDS):
            for seed in range(NUM_PROMPTS):
                engine.run(prompt_of(seed), 1)
                assert engine.drain(WAIT_S).has_ended
            engine.drop_device_cache()
        yield engine


def answer(
    question: Question, folder: Path, engine: KVTierEngine, instance_id: str = INSTANCE_ID
) -> tuple[int, str]:
    """Give a command while the engine carries out what operators want; return its status and what it has printed."""
    text = question.command.replace("FOLDER", str(folder)).replace("TENANT", tag_tenant(TENANT_SALT))
    text = text.replace(f" {INSTANCE_ID}", f" {instance_id}")
    command = text.replace("kvtier", f"{sys.executable} -m kvtier", 1) if text.startswith("kvtier") else text
    process = subprocess.Popen(  # noqa: S602 - a command of this file
        command,
        shell=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100", "TERM": "dumb"},
    )
    while True:
        engine.drain(0.0)
        try:
            # Waiting leaves the processor to the command; both pipes are read meanwhile.
            shown, errors = process.communicate(timeout=STEP_INTERVAL_S)
            break
        except subprocess.TimeoutExpired:
            continue
    printed = (shown + errors * (process.returncode != question.status)).replace(
        str(folder), "/var/cache/kvtier"
    )
    return process.returncode, printed.replace(instance_id, INSTANCE_ID)


def make_page(answers: Sequence[tuple[int, str]]) -> str:
    """Return the page. Pure."""
    parts = [PREFACE]
    for number, (question, (_, shown)) in enumerate(zip(QUESTIONS, answers, strict=True), 1):
        command = question.command.replace("FOLDER", "/var/cache/kvtier").replace(
            "TENANT", tag_tenant(TENANT_SALT)
        )
        parts += [f"## {number}. {question.text}", "", "```", f"$ {command}", *shorten(shown), "```", ""]
        parts += [question.reading, ""]
    return "\n".join(parts).rstrip() + "\n"


MAX_LINES = 36


def shorten(shown: str) -> list[str]:
    """Return the lines of an answer that the page shows: no empty ends, and of many the first. Pure."""
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], "..."]


PREFACE = """# Ten questions

An operator's first questions, each answered by one command in well under a minute. The answers come from a small
engine with an fs tier in `/var/cache/kvtier/fs`, and from a tenant's engine that used the same directory. This command
writes the page:

```
python -m scripts.ten_questions
```
"""

if __name__ == "__main__":
    sys.exit(main())
