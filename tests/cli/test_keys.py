"""``kvtier keys`` makes, rotates and drops keys, and proves that a dropped tenant's blocks open with none."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from tests.tiering.fs.slots import stored_blocks

from kvtier.base import JobId, OffloadKey, make_offload_key
from kvtier.cli.config_checks import check_config
from kvtier.cli.main import main
from kvtier.config import KEY_FILE_VARIABLE
from kvtier.tenants import tenant_number
from kvtier.testing.tier_suite import TierDriver, key_of, make_config, make_rows
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.kit.key_ring import add_entry, make_ring, read_ring, write_ring


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a ring with a default entry and one of a tenant; the environment names it."""
    path = tmp_path / "ring.json"
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    assert main(["keys", "create"]) == 0
    assert main(["keys", "rotate", "--tenant", "acme"]) == 0
    return path


def of_acme(number: int, salt: str = "") -> OffloadKey:
    """Return the key of a block of the tenant."""
    return make_offload_key(number.to_bytes(32, "big"), 0, tenant_number("acme", salt))


def entry_of(kind: str, directory: Path) -> dict[str, object]:
    """Return the settings of a tier."""
    entries: dict[str, dict[str, object]] = {
        "fs": {"type": "fs", "root_dir": str(directory / "fs"), "capacity_bytes": "4MiB"},
        "obj": {"type": "obj", "url": f"file://{directory}/store"},
    }
    return entries[kind]


def place_of(kind: str, directory: Path) -> str:
    """Return the same as a command's argument."""
    return {"fs": str(directory / "fs"), "obj": f"file://{directory}/store"}[kind]


def fill(kind: str, directory: Path, *, is_encrypting: bool = True, salt: str = "") -> None:
    """Store two blocks of the tenant and three of nobody's in a tier."""
    extra: dict[str, object] = {"encryption": True} if is_encrypting else {}
    extra |= {"tenant_salt": salt} if salt else {}
    rows = make_rows()
    tier = create_secondary_tier(entry_of(kind, directory), rows, replace(make_config(), extra_config=extra))
    driver = TierDriver(tier, rows)
    for job, keys in enumerate(([of_acme(1, salt), of_acme(2, salt)], [key_of(1), key_of(2), key_of(3)])):
        slots = np.arange(len(keys))
        tier.submit_store(
            JobMetadata(JobId(job), tuple(keys), slots, is_promotion=False, req_context=driver.request)
        )
        assert driver.wait(job).success
    assert tier.shutdown(30)


def test_create_rotate_and_list(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ring.stat().st_mode & 0o777 == 0o600
    assert main(["keys", "rotate"]) == 0
    assert "entry 3 encrypts" in capsys.readouterr().out
    assert main(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == ["1", "2", "3"]
    assert "tenant 'acme'" in shown
    assert main(["keys", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [entry["is_current"] for entry in entries] == [False, True, True]
    for entry in read_ring(ring).entries:
        assert entry.secret.hex() not in shown


def test_a_new_entry_is_told_to_programs_as_the_list_is(
    ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "rotate", "--json"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert main(["keys", "list", "--json"]) == 0
    assert changed == json.loads(capsys.readouterr().out)
    assert len(changed["entries"]) == len(read_ring(ring).entries) == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["create"], "exists already"),
        (["drop"], "--tenant"),
        (["drop", "--tenant", "unknown"], "those with one are acme"),
        (["list", "--tenant", "acme"], "--tenant"),
        (["rotate", "--prove", "/"], "--prove"),
        (["rotate", "--tenant", ""], "1 to 200 printable"),
        (["list", "--key-file", "/no/such/ring"], "does not exist"),
        (["rotate", "--key-file", "/no/such/ring"], "its folder cannot be opened"),
        (["list", "--key-file", "a\0b"], "zero byte"),
        (["list", "--key-file", "/"], "no regular file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    ring: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ring.read_bytes()
    assert main(["keys", *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
    assert ring.read_bytes() == before


def test_without_a_ring_named_the_command_says_how_to_name_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    assert main(["keys", "list"]) == 2
    assert KEY_FILE_VARIABLE in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fs", "obj"])
def test_a_drop_is_proven_in_every_place(
    ring: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(kind, tmp_path)
    place = place_of(kind, tmp_path)
    backup = ring.read_bytes()
    capsys.readouterr()
    assert main(["keys", "drop", "--tenant", "acme", "--prove", place, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[place]
    assert found["opened"] == 0
    assert found["blocks_of_tenant"] == 2
    assert found["encrypted_blocks"] > found["blocks_of_tenant"]
    # The proof proves: with the entry back in the ring it opens what it counted.
    dropped = json.loads(ring.read_text())
    dropped["entries"] = json.loads(backup)["entries"]
    ring.write_text(json.dumps(dropped))
    dropped["entries"] = [entry for entry in dropped["entries"] if entry["tenant"] != "acme"]
    assert main(["keys", "drop", "--tenant", "acme", "--prove", place]) == 0
    assert ": 0 opened" in capsys.readouterr().out


def test_a_proof_that_opens_a_block_ends_with_status_one(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = ring.with_name("default-only.json")
    assert main(["keys", "drop", "--tenant", "acme"]) == 0
    found = json.loads(ring.read_text())
    ring.write_text(
        json.dumps(found | {"dropped": {}})
    )  # as before the tenant had an entry: the default encrypts
    fill("fs", tmp_path)
    assert main(["keys", "rotate", "--tenant", "acme"]) == 0
    capsys.readouterr()
    assert main(["keys", "drop", "--tenant", "acme", "--prove", str(tmp_path / "fs")]) == 1
    assert "2 blocks of the tenant" in (shown := capsys.readouterr().out)
    assert "2 opened" in shown
    assert not fresh.exists()


def test_a_proof_knows_the_tenants_of_engines_with_a_salt_by_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "ring.json"))
    assert main(["keys", "create"]) == 0
    fill("fs", tmp_path, salt="geheim")  # with the default entry: the tenant has none yet
    assert main(["keys", "rotate", "--tenant", "acme"]) == 0
    fill("fs", tmp_path / "own", salt="geheim")
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"tenant_salt": "geheim", "tenants": {"*": {}}}))
    places = [str(tmp_path / "fs"), str(tmp_path / "own" / "fs")]
    prove = [
        "keys",
        "drop",
        "--tenant",
        "acme",
        "--json",
        *(word for place in places for word in ("--prove", place)),
    ]

    def proven(*options: str) -> tuple[int, list[tuple[int, int]]]:
        capsys.readouterr()
        status = main([*prove, *options])
        found = json.loads(capsys.readouterr().out)
        return status, [(found[place]["blocks_of_tenant"], found[place]["opened"]) for place in places]

    assert proven("--config", str(config)) == (1, [(2, 2), (2, 0)]), (
        "the default entry opens what it has encrypted"
    )
    assert proven() == (0, [(0, 0), (2, 0)])
    assert main(["keys", "list", "--config", str(config)]) == 2


def test_a_dropped_tenant_can_be_proven_again(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill("fs", tmp_path)
    assert main(["keys", "drop", "--tenant", "acme"]) == 0
    before = ring.read_bytes()
    assert main(["keys", "drop", "--tenant", "acme", "--prove", str(tmp_path / "fs")]) == 0
    assert "2 blocks of the tenant" in capsys.readouterr().out
    assert ring.read_bytes() == before


@pytest.mark.parametrize("kind", ["fs", "obj"])
def test_verify_checks_what_it_can_and_with_the_ring_everything(
    ring: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(kind, tmp_path)
    place = place_of(kind, tmp_path)
    capsys.readouterr()
    assert main(["verify", place, "--json"]) == 0
    states = json.loads(capsys.readouterr().out)["states"]
    assert states["encrypted"] == sum(states.values()) >= 5
    assert main(["verify", place, "--key-file", str(ring), "--json"]) == 0
    states = json.loads(capsys.readouterr().out)["states"]
    assert states["whole"] == sum(states.values()) >= 5
    assert main(["keys", "drop", "--tenant", "acme"]) == 0
    capsys.readouterr()
    assert main(["verify", place, "--key-file", str(ring), "--json"]) == 0
    states = json.loads(capsys.readouterr().out)["states"]
    assert states["no_key"] >= 2
    assert states["whole"] >= 3
    assert states["no_key"] + states["whole"] == sum(states.values())


def test_verify_names_blocks_whose_key_id_is_not_in_the_ring(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = ring.with_name("older.json")
    write_ring(older, read_ring(ring))
    assert main(["keys", "rotate"]) == 0
    fill("fs", tmp_path)
    capsys.readouterr()
    assert main(["verify", place_of("fs", tmp_path), "--key-file", str(older), "--json"]) == 0
    states = json.loads(capsys.readouterr().out)["states"]
    assert (states["no_key"], states["whole"], states["damaged"]) == (3, 2, 0)


@pytest.mark.parametrize("kind", ["fs", "obj"])
def test_verify_with_another_ring_calls_no_block_damaged_and_deletes_none(
    ring: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(kind, tmp_path)
    another = ring.with_name("another.json")
    assert main(["keys", "create", "--key-file", str(another)]) == 0
    capsys.readouterr()
    place = place_of(kind, tmp_path)
    assert main(["verify", place, "--key-file", str(another), "--delete", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["states"]["no_key"] == sum(found["states"].values()) >= 3
    assert main(["verify", place, "--key-file", str(ring), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["states"]["whole"] >= 3


def test_verify_calls_blocks_damaged_that_the_ring_named_though_it_opens_none_of_the_namespace(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill("fs", tmp_path)
    blocks = stored_blocks(tmp_path / "fs")
    for block in blocks:
        block.flip()
    another = ring.with_name("another.json")
    assert main(["keys", "create", "--key-file", str(another)]) == 0
    place = str(tmp_path / "fs")
    capsys.readouterr()
    assert main(["verify", place, "--key-file", str(another), "--delete", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["states"]["no_key"] == len(blocks) == 5
    assert main(["verify", place, "--key-file", str(ring), "--delete", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["states"]["damaged"], found["states"]["no_key"], found["removed"]) == (5, 0, 5)
    assert not stored_blocks(tmp_path / "fs")


def test_verify_finds_a_flipped_bit_with_the_ring_and_a_moved_block_without(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill("fs", tmp_path)
    damaged, source, target, *_ = stored_blocks(tmp_path / "fs")
    damaged.flip()
    target.write(source.read())
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "fs"), "--json"]) == 1
    states = json.loads(capsys.readouterr().out)["states"]
    assert (states["moved"], states["damaged"]) == (1, 0)
    assert main(["verify", str(tmp_path / "fs"), "--key-file", str(ring), "--json"]) == 1
    states = json.loads(capsys.readouterr().out)["states"]
    assert (states["moved"], states["damaged"]) == (1, 1)


def test_inspect_and_purge_work_without_the_ring(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill("fs", tmp_path)
    fill("fs", tmp_path, is_encrypting=False)
    place = str(tmp_path / "fs")
    capsys.readouterr()
    assert main(["inspect", place]) == 0
    shown = capsys.readouterr().out
    assert shown.count("namespace ") == 2
    assert "encrypted" in shown
    assert main(["purge", place, "--all"]) == 0
    assert not stored_blocks(tmp_path / "fs")


def tenants_in(place: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[int, int]:
    """Return the blocks of each tenant of requests, as ``inspect`` counts them."""
    capsys.readouterr()
    assert main(["inspect", place, "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)["namespaces"]
    return {int(one["number"], 16): one["blocks"] for namespace in found for one in namespace["tenants"]}


@pytest.mark.parametrize("kind", ["fs", "obj"])
def test_inspect_and_purge_know_the_tenants_of_encrypted_blocks_with_the_ring_alone(
    ring: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(kind, tmp_path)
    place, with_ring, number = place_of(kind, tmp_path), ("--key-file", str(ring)), tenant_number("acme")
    other = tmp_path / "other.json"
    write_ring(other, add_entry(make_ring(), None, 1.0))
    assert tenants_in(place, capsys) == {}
    assert tenants_in(place, capsys, *with_ring) == {0: 3, number: 2}
    assert number not in tenants_in(place, capsys, "--key-file", str(other))
    assert main(["purge", place, "--tenant", "acme"]) == 2
    assert main(["purge", place, "--tenant", "acme", "--dry-run", *with_ring]) == 0
    assert "would remove 2 blocks" in capsys.readouterr().out
    assert main(["purge", place, "--tenant", "acme", *with_ring]) == 0
    assert tenants_in(place, capsys, *with_ring) == {0: 3}
    assert main(["purge", place, "--tenant", "acme", *with_ring]) == 2


def test_doctor_reads_the_ring_and_refuses_tiers_that_cannot_encrypt(ring: Path, tmp_path: Path) -> None:
    def check(**extra: object) -> dict[str, tuple[str, str]]:
        config = {"cpu_bytes_to_use": "1MiB", **extra}
        return {one.subject: (one.result.value, one.found) for one in check_config(config)}

    fs = entry_of("fs", tmp_path)
    found = check(encryption={"key_file": str(ring)}, secondary_tiers=[fs, {"type": "example"}])
    assert found["encryption"][0] == "ok"
    assert "2 entries" in found["encryption"][1]
    assert found["tier 0 (fs)"][0] == "ok"
    assert found["tier 1 (example)"][0] == "broken"
    assert "cannot encrypt" in found["tier 1 (example)"][1]
    assert (
        check(encryption={"key_file": str(ring), "tenant": "x"}, secondary_tiers=[fs])["encryption"][0]
        == "broken"
    )
    ring.chmod(0o640)
    assert "chmod 600" in check(encryption={"key_file": str(ring)}, secondary_tiers=[fs])["encryption"][1]
    assert "encryption" not in check(secondary_tiers=[fs])
