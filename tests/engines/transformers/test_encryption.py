"""An engine whose tier is encrypted answers with the same tokens, and what lies on the disk tells of no prompt."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from tests.engines.transformers.conftest import misses_of
from tests.tiering.fs.slots import StoredBlock, stored_blocks
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.cli.main import main
from kvtier.engines.transformers import GenerationResult, KVTierEngine
from kvtier.misses import NO_KEY_REASON, MissCause

pytest.importorskip("cryptography", reason="pip install 'kvtier[encryption]'")

WAIT_S = 30.0
NUM_NEW_TOKENS = 6
ROW_BYTES = 8192
HEADER_BYTES = 4096
PIECE_BYTES = 16
"""Of a block: two numbers of four bytes may be anywhere by chance, four in a row are not."""

MakeEngine = Callable[..., KVTierEngine]
Plain = Callable[[PreTrainedModel, list[int], int], tuple[list[int], torch.Tensor]]


class Site:
    """Engines that come and go over one place, and the ring of their keys."""

    def __init__(
        self, make_engine: MakeEngine, llama: LlamaForCausalLM, prompt: list[int], folder: Path
    ) -> None:
        self.ring = folder / "ring.json"
        self.place = folder / "place"
        self._make_engine = make_engine
        self._llama = llama
        self._prompt = prompt
        self.keys("create")

    def keys(self, *words: str) -> None:
        """Run ``kvtier keys``."""
        assert main(["keys", words[0], "--key-file", str(self.ring), *words[1:]]) == 0

    def start(self, tier: str, encryption: object = None, **more: object) -> KVTierEngine:
        """Start an engine; by default with the ring."""
        own = {"root_dir": str(self.place), "capacity_bytes": "64MiB"}
        settings = {
            "cpu_bytes_to_use": 256 * ROW_BYTES,
            "secondary_tiers": [{"type": tier, **own}],
            "encryption": {"key_file": str(self.ring)} if encryption is None else encryption,
        }
        return self._make_engine(self._llama, extra_config=settings | more)

    def fill(self, tier: str = "fs", encryption: object = None, **more: object) -> None:
        """Have an engine store the prompt, and end it."""
        engine = self.start(tier, encryption, **more)
        self.run(engine)
        assert engine.drain(WAIT_S)
        engine.shutdown()

    def run(self, engine: KVTierEngine, tenant: str | None = None) -> GenerationResult:
        """Answer the prompt, with nothing on the device."""
        engine.drop_device_cache()
        options = {} if tenant is None else {"tenant": tenant}
        return engine.run(self._prompt, NUM_NEW_TOKENS, **options)  # type: ignore[arg-type]  # as it takes them

    def files(self) -> list[Path]:
        """Return every file that an engine leaves in the place."""
        files = sorted(path for path in self.place.rglob("*") if path.is_file())
        return [path for path in files if path.suffix != ".notes"]


@pytest.fixture
def site(llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, tmp_path: Path) -> Site:
    """A place with a ring of one entry."""
    return Site(make_engine, llama, prompt, tmp_path)


@pytest.fixture
def tokens(llama: LlamaForCausalLM, prompt: list[int], plain: Plain) -> list[int]:
    """The right answer."""
    return plain(llama, prompt, NUM_NEW_TOKENS)[0]


def test_the_next_engine_finds_the_blocks_and_gives_the_same_tokens(site: Site, tokens: list[int]) -> None:
    site.fill()
    engine = site.start("fs")
    assert engine.drain(WAIT_S)
    result = site.run(engine)
    assert result.sources == {"fs": 72, "computed": 3}
    assert result.tokens == tokens


def pieces(block: StoredBlock) -> Iterable[bytes]:
    """Return pieces of a plain block that are no padding."""
    content = block.read()[HEADER_BYTES:]
    found = (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
    return {piece for piece in found if len(set(piece)) > 4}


def test_the_disk_has_no_bytes_and_no_names_of_the_plain_blocks(site: Site) -> None:
    site.fill()
    hidden, num_hidden = site.files(), len(stored_blocks(site.place))
    site.place = site.place.with_name("plain")
    site.fill(encryption=False)
    plain = stored_blocks(site.place)
    assert len(plain) == num_hidden >= 9

    everything = b"".join(path.read_bytes() + str(path).encode() for path in hidden)
    given_away = [piece for block in plain for piece in pieces(block) if piece in everything]
    assert len([piece for block in plain for piece in pieces(block)]) > 9 * 200
    assert not given_away
    for block in plain:
        assert block.name not in everything
        assert block.name[:8] not in everything
        assert block.name[:8].hex().encode() not in everything


def test_another_ring_finds_nothing_and_leaves_the_blocks_to_their_owner(
    site: Site, tokens: list[int]
) -> None:
    site.fill()
    own, other = site.ring, site.ring.with_name("other.json")
    site.ring = other
    site.keys("create")
    engine = site.start("fs")
    result = site.run(engine)
    assert (result.sources, result.tokens) == ({"computed": 75}, tokens)
    # Keyed names tell nothing: not even that these are the blocks of the same prompt.
    assert {miss.cause for miss in misses_of(engine)} == {MissCause.NEVER_SEEN}
    engine.shutdown()
    for site.ring in (own, other):
        assert site.run(site.start("fs")).sources == {"fs": 72, "computed": 3}


@pytest.mark.parametrize("has_old_page", [True, False])
def test_a_host_without_the_new_key_misses_what_it_encrypts_until_the_ring_is_copied(
    site: Site, tokens: list[int], has_old_page: bool
) -> None:
    """What the model computed at the start is under the new key, too, where the place was new when it was rotated."""
    own, old = site.ring, site.ring.with_name("old.json")
    old.write_bytes(own.read_bytes())
    old.chmod(0o600)
    if has_old_page:
        site.fill()
        for path in [*site.place.rglob("*.pack"), *site.place.rglob("*.index")]:
            path.unlink()
    site.keys("rotate")
    site.fill()
    before = site.files()
    site.ring = old
    engine = site.start("fs")
    result = site.run(engine)
    assert (result.sources, result.tokens) == ({"computed": 75}, tokens)
    cause = MissCause.LOAD_FAILED if has_old_page else MissCause.TIER_DOWN
    assert {(miss.cause, miss.tier) for miss in misses_of(engine)} == {(cause, "fs")}
    assert (engine.stats()["tier.0.fs.foreign"] > 0) == has_old_page
    assert site.files() == before
    engine.shutdown()
    old.write_bytes(own.read_bytes())
    result = site.run(site.start("fs"))
    assert (result.sources, result.tokens) == ({"fs": 72, "computed": 3}, tokens)


def test_after_a_rotation_the_old_blocks_are_read(site: Site, tokens: list[int]) -> None:
    site.fill()
    site.keys("rotate")
    result = site.run(site.start("fs"))
    assert (result.sources, result.tokens) == ({"fs": 72, "computed": 3}, tokens)


def test_nothing_is_read_of_a_tenant_whose_key_was_dropped(site: Site, tokens: list[int]) -> None:
    site.keys("rotate", "--tenant", "alice")
    tenants: dict[str, object] = {"tenants": {"alice": {}, "bob": {}}}
    engine = site.start("fs", **tenants)
    for name in ("alice", "bob"):
        site.run(engine, name)
    assert engine.drain(WAIT_S)
    engine.shutdown()
    before = site.files()

    site.keys("drop", "--tenant", "alice", "--prove", str(site.place))
    engine = site.start("fs", **tenants)
    result = site.run(engine, "alice")
    assert (result.sources, result.tokens) == ({"computed": 75}, tokens)
    assert {(miss.cause, miss.tier, miss.detail["reason"]) for miss in misses_of(engine)} == {
        (MissCause.LIMITED, "fs", NO_KEY_REASON)
    }
    result = site.run(engine, "bob")
    assert (result.sources, result.tokens) == ({"fs": 72, "computed": 3}, tokens)
    assert engine.drain(WAIT_S).has_ended
    assert site.files() == before
