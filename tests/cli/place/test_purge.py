"""``kvtier purge`` removes what its selectors choose, and asks for one."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.place.conftest import PLACE, Run
from tests.cli.place.places import NAMESPACES, A, B, MemoryPlace, put_down

from kvtier.cli.place.purge import choose
from kvtier.errors import ConfigError
from kvtier.namespace import LAYOUT_VERSION, tag_tenant
from kvtier.tenants import tenant_number
from kvtier.tiering.kit.place import PlaceNamespace

pytestmark = pytest.mark.usefixtures("filled")


@pytest.mark.parametrize(
    ("selectors", "left"),
    [
        (["--all"], ""),
        (["--namespace", A], "b-new"),
        (["--namespace", B[:6]], "a-new a-old"),
        (["--namespace", A, "--namespace", B], ""),
        (["--older-than", "9d"], "a-new b-new"),
        (["--older-than", "30s", "--namespace", A], "b-new"),
        (["--older-than", "30d"], "a-new a-old b-new"),
    ],
    ids=" ".join,
)
def test_what_is_selected_goes_and_nothing_else(run: Run, selectors: list[str], left: str) -> None:
    num_before = len(MemoryPlace.blocks_by_address)
    status, shown, _ = run("purge", PLACE, *selectors, "--json")
    assert status == 0
    assert sorted(MemoryPlace.blocks_by_address) == left.split()
    assert json.loads(shown)["blocks"] == num_before - len(left.split())
    assert MemoryPlace.num_ended == 1


@pytest.mark.parametrize(
    ("version", "left"),
    [
        (LAYOUT_VERSION - 1, "b-new"),
        (LAYOUT_VERSION, "a-new a-old b-new"),
        (LAYOUT_VERSION + 1, "a-new a-old b-new"),
    ],
)
@pytest.mark.parametrize("form", [int, float, str, bool])
def test_older_layouts_are_those_that_this_version_has_left_behind(
    run: Run, monkeypatch: pytest.MonkeyPatch, version: int, left: str, form: type
) -> None:
    document = json.dumps(json.loads(NAMESPACES[A].document) | {"layout_version": form(version)})
    monkeypatch.setitem(NAMESPACES, A, replace(NAMESPACES[A], document=document))
    status, shown, _ = run("purge", PLACE, "--older-layouts", "--json")
    expected = left if form is int else "a-new a-old b-new"
    assert (status, sorted(MemoryPlace.blocks_by_address)) == (0, expected.split())
    assert json.loads(shown)["blocks"] == 3 - len(expected.split())


def test_a_namespace_narrows_older_layouts_down(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.dumps(json.loads(NAMESPACES[A].document) | {"layout_version": 1})
    monkeypatch.setitem(NAMESPACES, A, replace(NAMESPACES[A], document=document))
    assert run("purge", PLACE, "--older-layouts", "--namespace", B)[0] == 0
    assert len(MemoryPlace.blocks_by_address) == 3


def test_a_dry_run_says_what_would_go_and_leaves_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPlace, "has_owner", True)
    status, shown, _ = run("purge", PLACE, "--namespace", A, "--dry-run")
    assert status == 0
    assert "would remove 2 blocks, 200 B" in shown
    assert len(MemoryPlace.blocks_by_address) == 3


def test_without_a_selector_all_is_asked_for(run: Run) -> None:
    status, _, said = run("purge", PLACE)
    assert status == 2
    assert "--all" in said
    assert len(MemoryPlace.blocks_by_address) == 3


@pytest.mark.parametrize(
    "selectors",
    [
        ["--all", "--namespace", A],
        ["--namespace", "0"],
        ["--namespace", "ffffffffffff"],
        ["--namespace", ""],
        ["--tenant", "nobody"],
        ["--tenant", ""],
        ["--older-than", "7"],
        ["--older-than", "-7d"],
        ["--older-than", ""],
    ],
    ids=" ".join,
)
def test_a_selector_that_selects_nothing_is_one_line_and_nothing_goes(run: Run, selectors: list[str]) -> None:
    status, shown, said = run("purge", PLACE, *selectors)
    assert (status, shown) == (2, "")
    assert len(said.splitlines()) == 1
    assert len(MemoryPlace.blocks_by_address) == 3


def test_a_place_whose_blocks_have_no_time_says_which_have(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPlace, "has_times", False)
    status, _, said = run("purge", PLACE, "--older-than", "1d")
    assert status == 2
    assert "no time" in said
    assert "fs" in said


@pytest.mark.parametrize("is_forced", [False, True])
def test_what_an_engine_keeps_goes_only_by_force(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_forced: bool
) -> None:
    monkeypatch.setattr(MemoryPlace, "has_owner", True)
    status, _, said = run("purge", PLACE, "--all", *["--force"] * is_forced)
    assert (status, said.count("belongs to process 1")) == ((0, 0) if is_forced else (2, 1))
    assert len(MemoryPlace.blocks_by_address) == (0 if is_forced else 3)
    assert MemoryPlace.was_forced == is_forced


def test_a_place_that_may_not_be_emptied_now_stays_as_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryPlace, "has_owner", True)
    status, _, said = run("purge", PLACE, "--all")
    assert status == 2
    assert "belongs to process 1" in said


def test_a_tenant_of_requests_loses_his_blocks_and_no_other(run: Run) -> None:
    for address, name in (("a-alice", "alice"), ("b-alice", "alice"), ("a-bob", "bob")):
        put_down({"a": A, "b": B}[address[0]], address, 60.0, time.time(), tenant=tenant_number(name))
    status, shown, _ = run("purge", PLACE, "--tenant", "alice", "--namespace", A)
    assert (status, shown.split(",")[0]) == (0, "removed 1 block")
    assert run("purge", PLACE, "--tenant", "alice")[0] == 0
    assert sorted(MemoryPlace.blocks_by_address) == ["a-bob", "a-new", "a-old", "b-new"]
    assert run("purge", PLACE, "--tenant", "alice")[0] == 2


SALT = "geheim"


@pytest.fixture
def engine(tmp_path: Path) -> str:
    """Return the file with the settings of an engine that has a salt."""
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"kv_connector_extra_config": {"tenant_salt": SALT, "tenants": {"*": {}}}}))
    return str(path)


def document_with(monkeypatch: pytest.MonkeyPatch, name: str, **fields: object) -> None:
    """Change what a namespace's document says."""
    namespace = NAMESPACES[name]
    document = json.dumps({**json.loads(namespace.document), **fields})
    monkeypatch.setitem(NAMESPACES, name, replace(namespace, document=document))


def test_a_name_under_two_salts_is_two_tenants_and_each_is_removed_with_its_own_settings(
    run: Run, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document_with(monkeypatch, B, tenant=tag_tenant(SALT))
    put_down(A, "a-alice", 60.0, time.time(), tenant=tenant_number("alice"))
    put_down(B, "b-alice", 60.0, time.time(), tenant=tenant_number("alice", SALT))
    status, shown, said = run("purge", PLACE, "--tenant", "alice")
    assert (status, shown.split(",")[0]) == (0, "removed 1 block")
    assert "b-alice" in MemoryPlace.blocks_by_address
    assert "1 namespace of engines with another tenant_salt" in said
    assert "--config" in said
    status, _, said = run("purge", PLACE, "--tenant", "alice")
    assert status == 2
    assert "--config" in said
    status, shown, said = run("purge", PLACE, "--tenant", "alice", "--config", engine)
    assert (status, shown.split(",")[0]) == (0, "removed 1 block")
    assert sorted(MemoryPlace.blocks_by_address) == ["a-new", "a-old", "b-new"]
    assert SALT not in shown + said


def test_blocks_of_an_older_layout_tell_no_tenant_and_are_named_as_left(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    document_with(monkeypatch, B, layout_version=1)
    for address, namespace in (("a-alice", A), ("b-alice", B)):
        put_down(namespace, address, 60.0, time.time(), tenant=tenant_number("alice"))
    status, _, said = run("purge", PLACE, "--tenant", "alice")
    assert status == 0
    assert "b-alice" in MemoryPlace.blocks_by_address
    assert "1 namespace of an older layout" in said
    found = json.loads(run("inspect", PLACE, "--json")[1])["namespaces"]
    assert [one["tenants"] for one in found if one["name"] == B] == [[]]


def test_settings_of_an_engine_that_cannot_be_read_remove_nothing(run: Run, tmp_path: Path) -> None:
    put_down(A, "a-alice", 60.0, time.time(), tenant=tenant_number("alice"))
    assert run("purge", PLACE, "--tenant", "alice", "--config", str(tmp_path / "missing"))[0] == 2
    assert "a-alice" in MemoryPlace.blocks_by_address


def namespace_of(tenant: str, name: str) -> PlaceNamespace:
    return PlaceNamespace(name, json.dumps({"layout_version": 1, "tenant": tenant}))


def test_a_tenant_is_all_namespaces_with_its_tag_and_narrows_others_down() -> None:
    known = [namespace_of("t1", "aaaa1"), namespace_of("t1", "aaaa2"), namespace_of("t2", "bbbb1")]
    known += [namespace_of("", "cccc1"), PlaceNamespace("dddd1")]
    assert choose(known, [], "t1") == ("aaaa1", "aaaa2")
    assert choose(known, ["aaaa2", "bbbb"], "t1") == ("aaaa2",)
    assert choose(known, [], None) is None
    with pytest.raises(ConfigError, match="t1, t2"):
        choose(known, [], "t3")
    with pytest.raises(ConfigError, match="--tenant"):
        choose(known, [], "")
