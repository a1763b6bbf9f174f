"""What a store holds is listed, checked and removed without an engine, and by a living one."""

import json

import pytest
from tests.cli.place.conftest import Run, run
from tests.tiering.mooncake.conftest import StartTier, salted
from tests.tiering.mooncake.live import SEGMENT_BYTES, LiveStore
from tests.tiering.purged import check_purge

from kvtier.errors import ConfigError, TierError
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, make_config
from kvtier.testing.tiering_driver import ROW_BYTES as DRIVEN_ROW_BYTES
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.place import Place
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.places import open_place

__all__ = ["run"]

pytestmark = pytest.mark.servers

BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES


@pytest.fixture
def place(shared_store: LiveStore) -> Place:
    """The shared store."""
    own = {"master": shared_store.address, "admin_port": shared_store.admin_port, "allow_any_interface": True}
    return MooncakeTier.open_place(own)


def name_of_model(salt: str, model: str = "model-a") -> str:
    return make_namespace(salted(make_config(model), salt), ROW_BYTES).name


def test_a_place_says_what_blocks_take_and_how_much_memory_is_lent(
    shared_store: LiveStore, start_tier: StartTier, salt: str, place: Place
) -> None:
    start_tier(shared_store).store([1, 2])
    assert [block.num_bytes for block in place.blocks([name_of_model(salt)])] == [BLOCK_BYTES] * 2
    assert place.summary().capacity_bytes == 2 * SEGMENT_BYTES
    place.close()


def test_the_commands_work_on_a_store(
    shared_store: LiveStore, start_tier: StartTier, salt: str, run: Run
) -> None:
    start_tier(shared_store).store([1, 2, 3])
    start_tier(shared_store, "model-b").store([3])
    name = name_of_model(salt)
    where = json.dumps(
        {
            "type": "mooncake",
            "master": shared_store.address,
            "admin_port": shared_store.admin_port,
            "allow_any_interface": True,
        }
    )
    status, out, _ = run("inspect", where, "--json")
    found = {one["name"]: one["blocks"] for one in json.loads(out)["namespaces"]}
    assert (status, found[name]) == (0, 3)
    # Other tests of the session have put damaged values beside these.
    status, out, _ = run("verify", where, "--json")
    assert status in (0, 1)
    assert json.loads(out)["states"]["whole"] >= 4
    assert run("purge", where, "--namespace", name)[1].startswith("removed 3 blocks")
    found = {
        one["name"]: one["blocks"] for one in json.loads(run("inspect", where, "--json")[1])["namespaces"]
    }
    assert name not in found
    assert found[name_of_model(salt, "model-b")] == 1
    status, _, err = run("purge", where, "--older-than", "1d")
    assert status == 2
    assert "its blocks have no time" in err


def test_a_page_that_does_not_answer_is_named_with_its_setting(shared_store: LiveStore) -> None:
    with pytest.raises(TierError, match="is admin_port its --metrics_port"):
        open_place(
            json.dumps(
                {
                    "type": "mooncake",
                    "master": shared_store.address,
                    "admin_port": 1,
                    "allow_any_interface": True,
                }
            )
        )
    with pytest.raises(TierError, match=r"page http://127\.0\.0\.1:9003"):
        open_place(
            json.dumps({"type": "mooncake", "master": shared_store.address, "allow_any_interface": True})
        )


def test_a_url_alone_allows_no_listener(shared_store: LiveStore) -> None:
    with pytest.raises(ConfigError, match="allow_any_interface"):
        open_place(f"mooncake://{shared_store.address}")


def test_a_living_engine_purges_what_it_has_in_a_store(shared_store: LiveStore, salt: str) -> None:
    config = salted(make_config("model-a", DRIVEN_ROW_BYTES), salt)
    check_purge(
        lambda view: MooncakeTier(config, view, master=shared_store.address, allow_any_interface=True),
        is_named=False,
    )
