"""What a user writes on the command line becomes what is simulated, or is refused with what was expected."""

import pytest

from kvtier.cli.simulate.options import (
    blocks_of,
    make_engine,
    make_host,
    parse_hints,
    parse_load_if,
    parse_tier,
    split_names,
)
from kvtier.cli.traces import take_first
from kvtier.config import LoadIf
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.sim.clients import EXACT, ClientHints, HintNoise, Honesty
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import HostModel
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import TraceRequest, make_trace

TRACE = make_trace([TraceRequest(float(number), 512, 1, (number,)) for number in range(3)], 512)


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("fs:1000:3GB/s", TierModel("fs", 10, LinkSpeed(3e9, 3e9, 100e-6, 8))),
        ("fs:1000:3GB/s:2ms", TierModel("fs", 10, LinkSpeed(3e9, 3e9, 0.002, 8))),
        ("obj:1 KiB:1GB/s,500MB/s:1.5s:64", TierModel("obj", 10, LinkSpeed(1e9, 5e8, 1.5, 64))),
        ("a:199:1B/s:1us:1", TierModel("a", 1, LinkSpeed(1.0, 1.0, 1e-6, 1))),
    ],
)
def test_a_tier_is_a_name_a_capacity_and_a_speed(text: str, tier: TierModel) -> None:
    assert parse_tier(text, block_bytes=100) == tier


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fs", "must be NAME:CAPACITY:BANDWIDTH"),
        (":1GiB:1GB/s", "must be NAME:CAPACITY:BANDWIDTH"),
        ("fs:1GiB:1GB/s:1ms:8:9", "must be NAME:CAPACITY:BANDWIDTH"),
        ("fs:1GiB:1GB", "BANDWIDTH must end in /s"),
        ("fs:1GiB:fast/s", "whole number of bytes from 1"),
        ("fs:much:1GB/s", "whole number of bytes from 1"),
        ("a[/b]:1GiB:1GB/s", "letters, digits"),
        ("a.b:1GiB:1GB/s", "letters, digits"),
        ("fs:99:1GB/s", "is smaller than a block of the trace .100 bytes"),
        ("fs:1GiB:1GB/s:soon", "LATENCY must be a number with us, ms or s"),
        ("fs:1GiB:1GB/s:1ms:many", "STREAMS must be an integer"),
        ("fs:1GiB:1GB/s:1ms:0", "STREAMS must be an integer from 1"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tier(text, block_bytes=100)


def test_host_memory_has_the_tiers_behind_it_and_begins_with_the_first_policy() -> None:
    tiers = [parse_tier("fs:1000:3GB/s", 100)]

    assert make_host(["arc", "lru"], 7, tiers, 2, LoadIf.FASTER) == HostModel(
        7, "arc", tiers=tuple(tiers), store_threshold=2, load_if=LoadIf.FASTER
    )


def test_names_stand_between_commas() -> None:
    assert split_names(" lru, arc,,") == ["lru", "arc"]


def test_what_is_loaded_is_named_as_in_the_settings() -> None:
    assert [parse_load_if(text) for text in ("faster", "always")] == [LoadIf.FASTER, LoadIf.ALWAYS]
    with pytest.raises(ConfigError, match="--load-if='sometimes': must be one of 'always', 'faster'"):
        parse_load_if("sometimes")


def test_an_unknown_policy_and_none_at_all_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'lru'"):
        make_host(["lruu"], 7, [], 0)
    with pytest.raises(ConfigError, match="name one of arc"):
        make_host([], 7, [], 0)


def test_a_policy_named_twice_a_negative_threshold_and_the_name_of_another_origin_are_refused() -> None:
    with pytest.raises(ConfigError, match="--policy='lru': is named twice"):
        make_host(["lru", "arc", "lru"], 7, [], 0)
    with pytest.raises(ConfigError, match="--store-threshold=-3"):
        make_host(["lru"], 7, [], -3)
    with pytest.raises(ConfigError, match="--tier='computed'"):
        make_host(["lru"], 7, [parse_tier("computed:1000:3GB/s", 100)], 0)


def test_the_engine_s_blocks_are_the_trace_s() -> None:
    engine = make_engine(TRACE, device="1MiB", kv_size="256", max_running=3, prefill=10.0, decode=2.0)

    assert (engine.block_tokens, engine.block_bytes, engine.num_device_blocks) == (512, 131_072, 8)


def test_a_size_below_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--host='1KiB': is smaller than a block of the trace .4096 bytes"):
        blocks_of("--host", "1KiB", 4096)


def test_only_the_first_requests_are_taken_on_demand() -> None:
    assert take_first(TRACE, 2).num_accesses == 2
    assert take_first(TRACE, None) is TRACE
    with pytest.raises(ConfigError, match="--requests"):
        take_first(TRACE, 0)


@pytest.mark.parametrize(
    ("noise", "parsed"),
    [
        ("", EXACT),
        ("wrong=0.3, silent=0.5,factor=2", HintNoise(wrong_share=0.3, silent_share=0.5, time_factor=2)),
        ("hostile,liars=0.5,seed=7", HintNoise(honesty=Honesty.HOSTILE, liar_share=0.5, seed=7)),
        ("random", HintNoise(honesty=Honesty.RANDOM)),
    ],
)
def test_the_errors_of_hints_are_read(noise: str, parsed: HintNoise) -> None:
    assert parse_hints("returns", noise) == (ClientHints.RETURNS, parsed)


@pytest.mark.parametrize(
    ("hints", "noise", "named"),
    [
        ("soon", "", "--hints"),
        ("as_last_turn", "", "--hints"),
        ("returns", "wrong", "--hint-noise"),
        ("returns", "wrong=x", "--hint-noise"),
        ("returns", "wrong=true", "--hint-noise"),
        ("returns", "often=1", "--hint-noise"),
        ("returns", "wrong=1.5", "--hint-noise"),
        ("returns", "factor=0.5", "--hint-noise"),
        ("returns", "random=1", "--hint-noise"),
    ],
)
def test_hints_that_make_no_sense_are_refused(hints: str, noise: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_hints(hints, noise)
