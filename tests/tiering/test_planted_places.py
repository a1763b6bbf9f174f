"""Whatever lies where a tier keeps its blocks: an engine starts without the tier, with one line, or with it.

A required tier that cannot start refuses with one error that names the place.
"""

import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import KVTierError, MissingExtraError, PlaceError, TierError
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import TierDriver, key_of, make_config, make_rows
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.factory import check_tier_config
from kvtier.tiering.spec import TieringOffloadingSpec

HANG_GUARD_S = 60.0
NOBODY = 65534
MODEL = "planted"

ENTRIES: dict[str, Callable[[Path], dict[str, object]]] = {
    "fs": lambda folder: {"type": "fs", "root_dir": str(folder / "place"), "capacity_bytes": "8MiB"},
    "obj": lambda folder: {"type": "obj", "url": f"file://{folder / 'place'}", "num_threads": 1},
}
"""The settings of a tier in a folder."""

NAMES: dict[str, tuple[str, ...]] = {
    "fs": (
        "place",
        "place/.lock",
        "place/.purge",
        "place/.purge.tmp",
        "place/0123456789abcdef.notes",
        "place/0123456789abcdef.notes.new",
        "place/{namespace}",
        "place/{namespace}/.released",
        "place/{namespace}/namespace.json",
        "place/{namespace}/probe.page",
        "place/{namespace}/0123456789abcdef.pack",
        "place/{namespace}/0123456789abcdef.new",
        "place/{namespace}/0123456789abcdef.index",
        "place/{namespace}/0123456789abcdef.index.tmp",
    ),
    "obj": (
        "place",
        "place/kvtier",
        "place/kvtier/{namespace}",
        "place/kvtier/{namespace}/namespace.json",
        "place/kvtier/{namespace}/00",
        "place/kvtier/{namespace}/00/{block}.kv",
    ),
}
"""Every name of a place that a tier makes, reads or opens."""


def plant_of_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    try:
        os.chown(path, NOBODY, NOBODY)
    except PermissionError:
        pytest.skip("only the superuser gives files away")


def plant_unreadable(path: Path) -> None:
    path.write_bytes(b"secret")
    path.chmod(0)


def plant_open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def plant_folder_with_a_pipe(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "pipe")


def plant_holes(path: Path) -> None:
    with path.open("xb") as file:
        file.truncate(2**40)


PLANTED: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "folder with a pipe": plant_folder_with_a_pipe,
    "folder of another user": plant_of_another_user,
    "folder that others may write": plant_open_folder,
    "foreign file": lambda path: path.write_bytes(b"a photograph" * 1000),
    "empty file": Path.touch,
    "unreadable file": plant_unreadable,
    "file of holes": plant_holes,
    "loop of links": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to(path.with_name("nowhere") / "deep"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)),
}

CASES = [(tier, name, planted) for tier, names in NAMES.items() for name in names for planted in PLANTED]


def start(entry: dict[str, object], rows: memoryview) -> list[SecondaryTierManager]:
    """Start an engine's tiers within a time."""
    settings = {"cpu_bytes_to_use": 2**20, "secondary_tiers": [entry]}
    config = replace(make_config(MODEL), extra_config=settings)
    found: list[SecondaryTierManager] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(TieringOffloadingSpec(config)._make_tiers(rows))
        except BaseException as error:  # handed to the test  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive(), "the start hangs"
    if errors:
        raise errors[0]
    return found


def path_of(folder: Path, name: str) -> Path:
    config = make_config(MODEL)
    namespace = make_namespace(config, config.groups[0].page_size_bytes)
    names = {"namespace": namespace.name, "block": key_of(0).hex(), "pid": str(os.getpid())}
    return folder / name.format(**names)


@pytest.mark.parametrize(("tier", "name", "planted"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_tier_that_is_not_required_ends_no_start(
    tier: str, name: str, planted: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = ENTRIES[tier](tmp_path)
    try:
        check_tier_config(entry)
    except MissingExtraError as error:
        pytest.skip(str(error))
    path = path_of(tmp_path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        if parent == tmp_path:
            break
        parent.chmod(0o700)
    PLANTED[planted](path)
    caplog.set_level(logging.WARNING)
    rows = make_rows()
    tiers = start(entry, rows)
    for started in tiers:
        driver = TierDriver(started, rows)
        driver.store([0, 1])  # it may fail, and it ends
        driver.load([0, 1])
        assert started.shutdown(HANG_GUARD_S)
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(lines) == (0 if tiers else 1)
    if not tiers:
        shown = str(tmp_path / "place")[:50]  # values are cut at 80 characters
        assert shown in lines[0]
        with pytest.raises((PlaceError, TierError)) as caught:
            start(entry | {"required": True}, rows)
        assert isinstance(caught.value, KVTierError)
        assert shown in str(caught.value)
        assert ": " in str(caught.value)
