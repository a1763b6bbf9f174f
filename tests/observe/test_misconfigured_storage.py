"""Full disks, KV groups and requests that no tier can serve are named by ``kvtier why``."""

import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.observe.site import (
    CONFIG,
    PROMPT,
    MakeSite,
    fill_host,
    fs,
    miss_in,
    not_stored_now,
    serve_again,
)
from tests.tiering.disks import small_disk_at

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.config import GroupKind, KVGroup
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.misses import Detail, Miss, MissCause, NotStored
from kvtier.testing.tiering_driver import ROW_BYTES
from kvtier.tiering.fs.system_calls import Buffers, SystemCalls

NUM_KEPT = 5
"""Blocks of a prompt that ShortGroupPolicy keeps of the second KV group."""


class ShortGroupPolicy(LRUCachePolicy):
    """Keeps everything of the first KV group, and of the second the first blocks that are offered."""

    def admit(self, keys: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        second = [key for key in keys if get_offload_group_idx(key) == 1][NUM_KEPT:]
        return [key for key in keys if key not in set(second)]


# Disks without room.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB, where this user may mount one."""
    with small_disk_at(tmp_path / "disk") as folder:
        yield folder


def test_a_disk_that_other_data_fills_is_named(small_disk: Path, make_site: MakeSite) -> None:
    site = make_site(fs(small_disk / "cache"), num_blocks=16)
    fill_up(small_disk / "other data")
    site.serve(PROMPT)
    fill_host(site)
    serve_again(site)

    assert miss_in(site) == not_stored_now(NotStored.NO_ROOM, "fs")
    assert site.findings[0] == "not_stored:no_room"
    assert "the disk is full" in site.report.findings[0].text


def test_a_disk_that_refuses_every_block_for_want_of_room_is_named(
    tmp_path: Path, make_site: MakeSite
) -> None:
    is_full = False

    def write_or_refuse(fd: int, buffers: Buffers, offset: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(fd, buffers, offset)

    site = make_site(fs(tmp_path, calls=SystemCalls(pwritev=write_or_refuse)), num_blocks=16)
    is_full = True
    site.serve(PROMPT)
    fill_host(site)
    serve_again(site)

    assert miss_in(site) == not_stored_now(NotStored.NO_ROOM, "fs")
    assert site.findings[0] == "not_stored:no_room"


# KV groups that hold less.


@pytest.mark.parametrize("window_tokens", [None, 16], ids=["full attention", "sliding window"])
def test_a_kv_group_that_holds_less_is_named_with_why(make_site: MakeSite, window_tokens: int | None) -> None:
    kind = GroupKind.FULL if window_tokens is None else GroupKind.WINDOW
    second = KVGroup(4, ("window",), ROW_BYTES, kind, window_tokens)
    config = replace(CONFIG, groups=(KVGroup(4, ("full",), ROW_BYTES), second))
    policy = f"{__name__}:{ShortGroupPolicy.__name__}"
    site = make_site(config=config, cache_policy=policy)
    site.serve(PROMPT)
    serve_again(site)

    detail: Detail = {"reason": "admission", "ago_s": 0.0, "group": 1, "cause": "not_stored"}
    assert site.last.tokens_by_origin == {"host": 4 * NUM_KEPT}
    assert site.last.missed[0] == (4 * NUM_KEPT, 40, Miss(MissCause.GROUP_SHORT, "host", detail))
    assert site.findings[0] == "group_short:admission"
    assert "One KV group holds less" in site.report.findings[0].text


# Requests that are never looked up.


def test_prompts_whose_log_probabilities_are_wanted_are_named(make_site: MakeSite) -> None:
    site = make_site()
    site.serve(PROMPT)
    for _ in range(4):
        site.serve_excluded(PROMPT, "prompt_logprobs")

    assert miss_in(site) == Miss(MissCause.LIMITED, "", {"reason": "prompt_logprobs"})
    assert site.last.missed[0].num_tokens == len(PROMPT)
    assert site.findings[0] == "limited:prompt_logprobs"
    assert "prompt_logprobs" in site.report.findings[0].text


def fill_up(path: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError):
        path.write_bytes(bytes(2**20))
    assert os.statvfs(path.parent).f_bavail == 0
