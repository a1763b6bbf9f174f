"""``kvtier inspect`` shows whose blocks there are, how many, how old, and in what namespaces differ."""

import json
import re
import time
from pathlib import Path

import pytest
from tests.cli.place.conftest import PLACE, Run
from tests.cli.place.places import NAMESPACES, A, B, MemoryPlace, put_down

from kvtier.cli.place.inspect import count, to_lines
from kvtier.cli.place.options import describe
from kvtier.namespace import parse_document
from kvtier.tenants import tenant_number
from kvtier.tiering.kit.place import PlaceBlock, PlaceNamespace, PlaceSummary

pytestmark = pytest.mark.usefixtures("filled")


def test_namespaces_are_shown_in_words_with_blocks_bytes_and_ages(run: Run) -> None:
    status, shown, _ = run("inspect", PLACE)
    assert status == 0
    assert "3 blocks, 300 B" in shown
    assert "30.0% of it used" in shown
    # How long ago depends on how busy the machine is.
    assert re.search(f"namespace {A}: 2 blocks, 200 B, last used .* ago, the oldest 10 days ago", shown)
    assert "blocks by last use: 2 within an hour, 1 longer ago" in shown
    assert "model model-a" in shown
    assert f"differs from {A[:8]} in model.name" in shown
    assert "1 temporary file, 2 B" in shown
    assert "2 foreign entries, 3 B" in shown
    assert "in use by process 1" in shown


def test_json_has_the_same_for_programs(run: Run) -> None:
    status, shown, _ = run("inspect", PLACE, "--json")
    found = json.loads(shown)
    assert status == 0
    assert (found["blocks"], found["bytes"], found["used_ratio"]) == (3, 300, 0.3)
    by_name = {namespace["name"]: namespace for namespace in found["namespaces"]}
    assert {name: one["blocks"] for name, one in by_name.items()} == {A: 2, B: 1}
    assert by_name[B]["identity"]["model"]["name"] in {"model-a", "model-b"}
    assert by_name[A]["newest_use_s"] - by_name[A]["oldest_use_s"] == pytest.approx(10 * 86_400 - 60)
    assert by_name[A]["blocks_by_last_use"]["longer ago"] == 1
    assert found["temporary"] == {"num": 1, "bytes": 2}


def test_tenants_of_requests_are_counted_and_named_by_a_configuration(run: Run, tmp_path: Path) -> None:
    for address, tenant in (("x", tenant_number("alice")), ("y", tenant_number("bob")), ("z", 0)):
        put_down(A, address, 60.0, time.time(), tenant=tenant)
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"kv_connector_extra_config": {"tenants": {"alice": {}}}}))
    status, shown, _ = run("inspect", PLACE, "--config", str(config), "--json")
    assert status == 0
    [namespace] = [one for one in json.loads(shown)["namespaces"] if one["name"] == A]
    found = {one["number"]: (one["name"], one["blocks"], one["bytes"]) for one in namespace["tenants"]}
    assert found == {
        "00000000000000": (None, 1, 100),
        f"{tenant_number('alice'):014x}": ("alice", 1, 100),
        f"{tenant_number('bob'):014x}": (None, 1, 100),
    }
    shown = run("inspect", PLACE, "--config", str(config))[1]
    assert f"tenant {tenant_number('alice'):014x} (alice): 1 block, 100 B" in shown
    assert "of no tenant: 1 block" in shown


def test_what_each_tenant_has_is_added_up() -> None:
    documents = {A: "one", B: "two", "c" * 32: "one", "d" * 32: ""}
    namespaces = [
        PlaceNamespace(name, json.dumps({**parse_document(NAMESPACES[A].document), "tenant": tenant}))
        for name, tenant in documents.items()
    ]
    blocks = [PlaceBlock(name, name, 100, None) for name in documents]
    place = MemoryPlace("here")
    lines = to_lines(place, namespaces, count(blocks, namespaces, 0.0), PlaceSummary(), 0.0, {})
    assert [line for line in lines if "enant" in line and not line.startswith("  ")] == [
        "tenant one: 2 blocks, 200 B",
        "tenant two: 1 block, 100 B",
        "no tenant: 1 block, 100 B",
    ]


ROTATED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "sliding_window": 4096}

CONFIGS: dict[str, dict[str, object]] = {
    "below a role": {"model": ROTATED | {"quantization_config": {"quant_method": "awq"}}},
    "vLLM's fields by name": {
        "model_config.hf_text_config": ROTATED,
        "model_config.quantization": "awq",
        "model_config.hf_config": {"text_config": ROTATED},
    },
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_words_of_an_identity_name_rope_window_quantisation_and_tenant(config: dict[str, object]) -> None:
    document = {
        "layout_version": 1,
        "engine": "vllm",
        "kv_dtype": "fp8",
        "model": {
            "name": "m",
            "dtype": "bfloat16",
            "weights": "blake3-of-every-byte:5a",
            "config": config,
        },
        "groups": [{"block_size_tokens": 16}, {"block_size_tokens": 32}],
        "world_size": 2,
        "tenant": "4f4e",
        "epoch": "00",
    }
    words = ", ".join(describe(parse_document(json.dumps(document))))
    for part in (
        "rope yarn factor 4.0", "window 4096", "quantisation awq", "tenant 4f4e", "after a reset",
        "2 KV groups of 16/32 tokens", "2 workers", "KV fp8", "weights blake3-of-every-byte:5a",
    ):  # fmt: skip
        assert part in words


@pytest.mark.parametrize(
    "spoilt", [{"model": 1}, {"groups": "x"}, {"model": {"config": [1]}}, {"groups": [1]}]
)
def test_words_of_a_spoilt_document_do_no_harm(spoilt: dict[str, object]) -> None:
    assert describe({"layout_version": 1, **spoilt})


def test_words_in_a_place_do_not_move_the_cursor_of_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = json.dumps({"layout_version": 1, "tenant": "\x1b[2J", "model": {"name": "\x1b]0;evil\x07\nlast"}})
    monkeypatch.setattr(MemoryPlace, "namespaces", lambda _: [PlaceNamespace(A, evil)])
    status, shown, _ = run("inspect", PLACE)
    assert status == 0
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\x1b" not in run("purge", PLACE, "--tenant", "no one")[2]
