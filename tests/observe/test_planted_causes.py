"""One cause is planted, traffic runs over it, and what ``kvtier why`` says first is that cause."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.observe.site import (
    CONFIG,
    PROMPT,
    MakeSite,
    Site,
    chat,
    example,
    faulty,
    fill_host,
    fs,
    look_around,
    never_answering,
    serve_again,
    with_model,
    with_settings,
)
from tests.tiering.fs.slots import stored_blocks

from kvtier.config import KVGroup, OffloadingConfig
from kvtier.testing.faults import Faults
from kvtier.testing.tiering_driver import ROW_BYTES
from kvtier.tiering.base import TierSettings

Plant = Callable[[MakeSite, Path], Site]

NUM_DOCUMENTS = 6
TURN_TOKENS = 16
SYSTEM = list(range(7000, 7032))
"""Eight blocks that all requests may share."""


class Planted(NamedTuple):
    """A cause and its traffic.

    Attributes:
        name: of the case.
        plant: serves the traffic.
        first: name of the first finding.
        words: a part of its text.
    """

    name: str
    plant: Plant
    first: str
    words: str = ""


# Traffic.


def documents(site: Site, num_times: int = 3, num_documents: int = NUM_DOCUMENTS) -> Site:
    """Ask some documents one after another, several times."""
    for _ in range(num_times):
        for number in range(1, num_documents + 1):
            site.serve(chat(number))
            site.clock.advance(10.0)
    return site


def there_and_back(site: Site) -> Site:
    """Ask documents forth and back."""
    for number in [*range(1, 9), *range(8, 0, -1)] * 2:
        site.serve(chat(number))
    return site


def turns(site: Site, num_users: int, num_turns: int = 6) -> Site:
    """Let users talk in turns; each prompt is the one before and something new."""
    for turn in range(1, num_turns + 1):
        for user in range(1, num_users + 1):
            site.serve(chat(user, 32 + turn * TURN_TOKENS))
    return site


def strangers(site: Site, num: int = 20) -> Site:
    """Ask what nobody has asked before."""
    for number in range(100, 100 + num):
        site.serve(chat(number))
    return site


def behind_system(site: Site, make_rest: Callable[[int], Iterator[int] | list[int]]) -> Site:
    """Ask with one system prompt and what ``make_rest`` makes for each request."""
    for number in range(12):
        site.serve([*SYSTEM, *make_rest(number)])
    return site


def come_back(site: Site) -> Site:
    """Store a prompt, drop it from host memory, ask for it again."""
    site.serve(PROMPT)
    fill_host(site)
    serve_again(site)
    return site


def once(site: Site) -> Site:
    """Ask each document once."""
    return documents(site, num_times=1)


def after(
    config: OffloadingConfig,
    *others: OffloadingConfig,
    prompts: Callable[[Site], Site] = once,
    before: Callable[[Site], Site] = once,
) -> Plant:
    """Serve with an engine of ``config``, then with others, then with the usual one on the same directory."""

    def plant(make_site: MakeSite, folder: Path) -> Site:
        for one in (config, *others):
            before(make_site(fs(folder), config=one, num_blocks=400))
        return prompts(make_site(fs(folder), num_blocks=400))

    return plant


# What is planted.


def of_host(num_blocks: int, traffic: Callable[[Site], Site] = documents, policy: str = "lru") -> Plant:
    def plant(make_site: MakeSite, folder: Path) -> Site:
        return traffic(make_site(num_blocks=num_blocks, cache_policy=policy))

    return plant


def with_params(params: dict[str, object]) -> Plant:
    def plant(make_site: MakeSite, folder: Path) -> Site:
        site = make_site()
        for _ in range(6):
            site.serve(PROMPT, params)
        return site

    return plant


def no_files(make_site: MakeSite, folder: Path) -> Site:
    site = make_site(fs(folder / "cache"), num_blocks=16)
    site.serve(PROMPT)
    fill_host(site)
    shutil.rmtree(folder / "cache")
    look_around(site)
    serve_again(site, 8)
    return site


def half_deleted(*suffixes: str) -> Plant:
    """Ask documents; after each round delete files of every other pack. Who has an index open does not miss it."""

    def plant(make_site: MakeSite, folder: Path) -> Site:
        site = documents(make_site(fs(folder), num_blocks=16), num_times=1)
        for _ in range(4):
            indexes = sorted(folder.rglob("*.index"), key=lambda path: path.stat().st_mtime_ns)
            for index in indexes[::-2]:
                for suffix in suffixes:
                    index.with_suffix(suffix).unlink()
            look_around(site)
            documents(site, num_times=1)
        return site

    return plant


def damaged(make_site: MakeSite, folder: Path) -> Site:
    site = make_site(fs(folder), num_blocks=16)
    site.serve(PROMPT)
    for block in stored_blocks(folder):
        block.flip()
    fill_host(site)
    serve_again(site, 8)
    return site


def failing_writes(make_site: MakeSite, folder: Path) -> Site:
    faults = Faults(fail_ratio=1.0)
    site = make_site(faulty(faults), num_blocks=16)
    site.serve(PROMPT)
    faults.fail_ratio = 0.0
    fill_host(site)
    serve_again(site, 10)
    return site


def out_of_service(make_site: MakeSite, folder: Path) -> Site:
    faults = Faults()
    site = make_site(faulty(faults), num_blocks=16)
    faults.poll_raise_ratio = 1.0
    return documents(site)


def breaker_open(make_site: MakeSite, folder: Path) -> Site:
    faults = Faults()
    site = make_site(faulty(faults), num_blocks=16)
    site.serve(PROMPT)
    faults.lookup_raise_ratio = faults.fail_ratio = 1.0
    for number in range(30, 36):
        site.serve(chat(number))
    for _ in range(12):
        site.serve(PROMPT, {"skip_store": True})
    return site


def reset(make_site: MakeSite, folder: Path) -> Site:
    site = make_site(num_blocks=400)
    site.serve(PROMPT)
    site.half.reset()
    serve_again(site, 8)
    return site


def excluded(make_site: MakeSite, folder: Path) -> Site:
    site = make_site()
    site.serve(PROMPT)
    for _ in range(6):
        site.serve_excluded(PROMPT, "prompt_logprobs")
    return site


def salted(make_site: MakeSite, folder: Path) -> Site:
    site = make_site()
    for number in range(8):
        site.serve(PROMPT, salt=f"user {number}", key_salt=b"%d" % number)
    return site


def large_blocks(make_site: MakeSite, folder: Path) -> Site:
    config = replace(CONFIG, groups=(KVGroup(4, ("layer",), 8192),), extra_config={"block_size": 64})
    site = make_site(config=config)
    for number in range(8):
        site.serve(chat(number, 20))
    return site


def prompts_alone(make_site: MakeSite, folder: Path) -> Site:
    site = make_site(config=with_settings(offload_prompt_only=True))
    for number in range(1, 7):
        site.serve(chat(number, 16), num_answer_tokens=40)
        site.serve([*chat(number, 16), *range(900, 940)])
    return site


def all_from_device(make_site: MakeSite, folder: Path) -> Site:
    site = make_site()
    for _ in range(6):
        site.serve(PROMPT, num_device_tokens=60)
    return site


def late(make_site: MakeSite, folder: Path) -> Site:
    site = make_site(never_answering, deadline_s=0.0)
    return strangers(site, 6)


def small_tier(make_site: MakeSite, folder: Path) -> Site:
    return documents(make_site(example(max_blocks=32), num_blocks=16), num_times=4)


def small_folder(make_site: MakeSite, folder: Path) -> Site:
    return documents(make_site(fs(folder, num_blocks=64), num_blocks=16), num_times=4, num_documents=10)


def tier_threshold(make_site: MakeSite, folder: Path) -> Site:
    settings = TierSettings(max_in_flight_store_bytes=2**30, store_threshold=50)
    return come_back(make_site(example(settings), num_blocks=16))


def slow_tier(make_site: MakeSite, folder: Path) -> Site:
    faults = Faults(delay_ratio=1.0)
    site = make_site(faulty(faults, TierSettings(max_in_flight_store_bytes=2 * ROW_BYTES)), num_blocks=32)
    site.serve(PROMPT, settles=False)
    for number in range(2, 5):
        site.serve(chat(number), {"skip_load": True, "max_store_tokens": 48}, settles=False)
    faults.delay_ratio = 0.0
    site.settle()
    serve_again(site, 10)
    return site


def many_causes(make_site: MakeSite, folder: Path) -> Site:
    """Stores that are skipped, stores with a limit, loads that are skipped, new prompts: a fourth each."""
    site = make_site(num_blocks=400)
    kinds: list[dict[str, object]] = [{"skip_store": True}, {"max_store_tokens": 4}, {"skip_load": True}]
    for _ in range(3):
        for number, params in enumerate(kinds, 1):
            site.serve(chat(number), params)
    return strangers(site, 1)


def stamp(number: int) -> list[int]:
    return [500 + number, *range(200)]


def user_name(number: int) -> list[int]:
    return [*range(900, 904), 40 + number, *range(300)]


def tool_order(number: int) -> list[int]:
    tools = [list(range(100 * tool, 100 * tool + 32)) for tool in range(1, 13)]
    tools = tools[number:] + tools[:number]
    return [token for tool in tools for token in tool]


OTHER_MODEL = with_model(
    name="another", revision="two", dtype="float16", config_digest="cc", config_json='{"rope": 3}'
)

CASES = [
    *(Planted(f"host of {num} blocks", of_host(num), "host_too_small") for num in (16, 20, 32, 48, 64)),
    Planted("host with arc", of_host(48, policy="arc"), "host_too_small"),
    Planted("forth and back", of_host(32, there_and_back), "host_too_small"),
    Planted("users who talk in turns", of_host(64, lambda site: turns(site, 12)), "host_too_small"),
    Planted("few users who talk in turns", of_host(400, lambda site: turns(site, 3)), "never_seen"),
    Planted("host of two blocks", of_host(2), "host_too_small"),
    Planted("prompts that are new", of_host(400, strangers), "never_seen", "New prompts cannot hit"),
    Planted("new prompts and a small host", of_host(16, strangers), "never_seen"),
    Planted("a small tier", small_tier, "example_too_small"),
    Planted("a small folder", small_folder, "fs_too_small"),
    Planted(
        "a time stamp",
        of_host(2000, lambda site: behind_system(site, stamp)),
        "prefix_ends_early",
        "time stamp",
    ),
    Planted(
        "a user's name",
        of_host(2000, lambda site: behind_system(site, user_name)),
        "prefix_ends_early",
        "name",
    ),
    Planted(
        "tools in another order",
        of_host(2000, lambda site: behind_system(site, tool_order)),
        "prefix_ends_early",
        "order",
    ),
    Planted("salts", salted, "cache_salt_per_user"),
    Planted("blocks larger than prompts", large_blocks, "block_larger_than_prompts"),
    Planted(
        "another block size",
        after(replace(CONFIG, hash_block_size=2), before=strangers),
        "other_keys",
        "hash_block_size 2 (here 4)",
    ),
    Planted(
        "another block size, and blocks of its own",
        after(replace(CONFIG, hash_block_size=2), before=strangers, prompts=documents),
        "never_seen",
    ),
    Planted(
        "another hash",
        after(replace(CONFIG, hash_algorithm="xx"), before=strangers),
        "other_keys",
        "hash_algorithm",
    ),
    Planted(
        "another dtype",
        after(with_model(dtype="float16")),
        "other_namespace:model.dtype",
        "same dtype",
    ),
    Planted(
        "another RoPE",
        after(with_model(config_digest="bb", config_json='{"rope": 2}')),
        "other_namespace:model.config.rope",
    ),
    Planted("another revision", after(with_model(revision="two")), "other_namespace:model.revision"),
    Planted("another tenant", after(with_settings(tenant_salt="acme")), "other_namespace:tenant"),
    Planted("another KV dtype", after(replace(CONFIG, kv_dtype="fp8")), "other_namespace:kv_dtype"),
    Planted(
        "another layout",
        after(replace(CONFIG, kv_layout="HND")),
        "other_namespace:kv_layout",
        "attention backend",
    ),
    Planted(
        "the nearest of two",
        after(replace(CONFIG, kv_dtype="fp8"), OTHER_MODEL),
        "other_namespace:kv_dtype",
    ),
    Planted(
        "a store threshold", lambda make, _: documents(make(store_threshold=50)), "not_stored:reuse_filter"
    ),
    Planted("a tier's store threshold", tier_threshold, "not_stored:reuse_filter"),
    Planted(
        "an admission",
        lambda make, _: documents(make(cache_policy="tests.observe.site:RefusingPolicy")),
        "not_stored:admission",
    ),
    Planted("stores that are skipped", with_params({"skip_store": True}), "not_stored:skip_store"),
    Planted("stores with a limit", with_params({"max_store_tokens": 3}), "not_stored:max_store_tokens"),
    Planted("loads that are skipped", with_params({"skip_load": True}), "limited"),
    Planted("loads with a limit", with_params({"max_load_tokens": 4}), "limited"),
    Planted("prompts alone", prompts_alone, "not_stored:prompt_only"),
    Planted("requests for log probabilities", excluded, "limited:prompt_logprobs"),
    Planted("a tier that answers late", late, "late"),
    Planted("an open breaker", breaker_open, "tier_down:circuit breaker open"),
    Planted("a tier out of service", out_of_service, "tier_down:out of service"),
    Planted("writes that fail", failing_writes, "not_stored:job_failed"),
    Planted("a tier that is too slow", slow_tier, "not_stored:declined"),
    Planted("no files", no_files, "purged:removed by another program"),
    Planted("half of the packs", half_deleted(".index", ".pack"), "purged:removed by another program"),
    Planted("half of the pack files", half_deleted(".pack"), "purged:removed by another program"),
    Planted("damaged files", damaged, "damaged"),
    Planted("a reset", reset, "purged:reset"),
    Planted("all from the device", all_from_device, "all_from_device"),
    Planted("many causes", many_causes, "no_single_cause"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_said_first_is_what_was_planted(case: Planted, make_site: MakeSite, tmp_path: Path) -> None:
    site = case.plant(make_site, tmp_path)

    first = site.report.findings[0]
    assert first.name == case.first, [finding.text for finding in site.report.findings]
    assert case.words in first.text


def test_there_are_forty_of_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40
