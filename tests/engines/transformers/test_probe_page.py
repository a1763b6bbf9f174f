"""Two models that were given one name: the tier of the first is not used by the second, and stays whole."""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from tests.engines.transformers.conftest import misses_of
from tests.tiering.valkey.conftest import valkey_binary
from tests.tiering.valkey.live import LiveServer
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.cli.main import main
from kvtier.engines.transformers import KVTierEngine
from kvtier.misses import MissCause
from kvtier.tiering.kit import page_guard

pytestmark = pytest.mark.servers

WAIT_S = 30.0
NUM_NEW_TOKENS = 6
NUM_SHARED = 72
"""Tokens of the prompt's full blocks."""

NAMED = {"model_name": "one", "model_revision": "r1"}

MakeEngine = Callable[..., KVTierEngine]
Plain = Callable[[PreTrainedModel, list[int], int], tuple[list[int], torch.Tensor]]
Settings = dict[str, Any]  # Any: what a user writes as JSON


class ServedPage:
    """A page that a server keeps, with the methods of a file that these tests use."""

    def __init__(self, client: redis.Redis, name: bytes | str) -> None:
        self._client = client
        self._name = name

    def read_bytes(self) -> bytes:
        """Return its bytes."""
        kept = self._client.get(self._name)
        assert isinstance(kept, bytes)
        return kept

    def write_bytes(self, data: bytes) -> object:
        """Replace them."""
        return self._client.set(self._name, data)

    def unlink(self) -> object:
        """Remove it."""
        return self._client.unlink(self._name)


class Site:
    """Engines of one name over one place.

    Args:
        tier: the type of the place's tier.
        folder: where it is.
        make_engine: makes an engine.
        prompt: what they answer.
    """

    def __init__(self, tier: str, folder: Path, make_engine: MakeEngine, prompt: list[int]) -> None:
        self.tier = tier
        self.folder = folder / "place"
        self.prompt = prompt
        self._make_engine = make_engine
        self._more: Settings = {}
        self.folder.mkdir()
        self.server: LiveServer | None = None
        own: Settings
        if tier == "valkey":
            self.server = LiveServer(valkey_binary(), self.folder).start()
            self.place = self.server.url
            own = {"url": self.place}
        elif tier == "fs":
            own, self.place = {"root_dir": str(self.folder), "capacity_bytes": "64MiB"}, str(self.folder)
        else:
            self.place = self.folder.as_uri()
            own = {"url": self.place}
        self.own: Settings = {"type": tier, **own}

    def encrypt(self) -> None:
        """Encrypt what later engines store."""
        ring = self.folder.with_name("ring.json")
        assert main(["keys", "create", "--key-file", str(ring)]) == 0
        self._more["encryption"] = {"key_file": str(ring)}

    def start(self, model: PreTrainedModel) -> KVTierEngine:
        """Start an engine."""
        settings = {"cpu_bytes_to_use": "2MiB", "secondary_tiers": [self.own], **self._more}
        return self._make_engine(model, extra_config=settings, **NAMED)

    def fill(self, model: PreTrainedModel) -> None:
        """Have an engine store the prompt and end."""
        engine = self.start(model)
        engine.run(self.prompt, 1)
        assert engine.drain(WAIT_S)
        engine.shutdown()

    def await_blocks(self, engine: KVTierEngine) -> None:
        """Return when a running engine knows of what others have stored."""
        end_s = time.monotonic() + WAIT_S
        while self.tier == "fs" and not engine.stats()["tier.0.fs.indexed_blocks"]:
            assert time.monotonic() < end_s

    def sources(self, model: PreTrainedModel) -> dict[str, int]:
        """Return where a fresh engine takes the prompt from."""
        engine = self.start(model)
        found = dict(engine.run(self.prompt, 1).sources)
        engine.shutdown()
        return found

    def hit(self) -> dict[str, int]:
        """Return what the sources of the prompt are when the tier has it."""
        return {self.tier: NUM_SHARED, "computed": len(self.prompt) - NUM_SHARED}

    def miss(self) -> dict[str, int]:
        """Return what they are when it has not."""
        return {"computed": len(self.prompt)}

    def pages(self) -> Sequence[Path | ServedPage]:
        """Return what keeps pages."""
        if self.server is None:
            return list(self.folder.glob("**/*probe.page*"))
        client = self.server.client()
        return [ServedPage(client, name) for name in client.keys("*probe.page*")]

    def page(self) -> Path | ServedPage:
        """Return the only page."""
        (found,) = self.pages()
        return found


SHARED_TIERS = ["fs", "obj", "valkey"]
"""Those that several engines use at once."""


@pytest.fixture
def site_of(
    tmp_path: Path, make_engine: MakeEngine, prompt: list[int], request: pytest.FixtureRequest
) -> Callable[[str], Site]:
    def make(tier: str) -> Site:
        if tier == "obj":
            pytest.importorskip("obstore", reason="pip install 'kvtier[obj]'")
        site = Site(tier, tmp_path, make_engine, prompt)
        if site.server is not None:
            request.addfinalizer(site.server.close)
        return site

    return make


@pytest.fixture(params=SHARED_TIERS)
def site(request: pytest.FixtureRequest, site_of: Callable[[str], Site]) -> Site:
    return site_of(request.param)


@pytest.fixture(params=SHARED_TIERS)
def shared_site(request: pytest.FixtureRequest, site_of: Callable[[str], Site]) -> Site:
    return site_of(request.param)


@pytest.fixture
def other(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same architecture with other weights."""
    model = copy.deepcopy(llama)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(1.0 + 0.5 * torch.rand_like(tensor))
    return model


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_other_weights_of_the_same_name_find_nothing_and_leave_the_blocks_of_the_first(
    site: Site,
    llama: LlamaForCausalLM,
    other: LlamaForCausalLM,
    plain: Plain,
    caplog: pytest.LogCaptureFixture,
    is_encrypted: bool,
) -> None:
    if is_encrypted:
        pytest.importorskip("cryptography", reason="pip install 'kvtier[encryption]'")
        site.encrypt()
    site.fill(llama)
    assert not errors(caplog)
    engine = site.start(other)
    for _ in range(2):
        result = engine.run(site.prompt, NUM_NEW_TOKENS)
        assert result.sources.keys() <= {"computed", "device"}
        assert result.tokens == plain(other, site.prompt, NUM_NEW_TOKENS)[0]
        engine.drain(WAIT_S)
    assert engine.stats()[f"tier.0.{site.tier}.stored_blocks"] == 0
    engine.shutdown()
    (said,) = errors(caplog)
    assert "model_revision" in said
    assert "tenant_salt" in said
    caplog.clear()
    assert site.sources(llama) == site.hit()
    assert not errors(caplog)


def test_engines_that_were_built_before_either_served_share_where_their_weights_are_equal(
    shared_site: Site, llama: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = shared_site.start(llama), shared_site.start(copy.deepcopy(llama))
    first.run(shared_site.prompt, 1)
    assert first.drain(WAIT_S)
    shared_site.await_blocks(second)
    assert second.run(shared_site.prompt, 1).sources == shared_site.hit()
    assert not errors(caplog)


def test_of_engines_that_were_built_before_either_served_the_second_to_store_stands_back(
    shared_site: Site, llama: LlamaForCausalLM, other: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = shared_site.start(llama), shared_site.start(other)
    first.run(shared_site.prompt, 1)
    assert first.drain(WAIT_S)
    shared_site.await_blocks(second)
    assert second.run(shared_site.prompt, 1).sources == shared_site.miss()
    assert {miss.cause for miss in misses_of(second)} == {MissCause.TIER_DOWN}
    second.drain(WAIT_S)
    assert second.stats()[f"tier.0.{shared_site.tier}.stored_blocks"] == 0
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_damaged_page_is_counted_and_made_anew_and_no_reason_to_stand_back(
    site: Site, llama: LlamaForCausalLM, caplog: pytest.LogCaptureFixture, is_encrypted: bool
) -> None:
    if is_encrypted:
        pytest.importorskip("cryptography", reason="pip install 'kvtier[encryption]'")
        site.encrypt()
    site.fill(llama)
    whole = len(site.page().read_bytes())
    for damaged in (b"", site.page().read_bytes()[:-100], bytes(whole)):
        site.page().write_bytes(damaged)
        engine = site.start(llama)
        engine.run(site.prompt, 1)
        assert engine.drain(WAIT_S)
        assert engine.stats()[f"tier.0.{site.tier}.damaged"] == 1
        engine.shutdown()
        assert len(site.page().read_bytes()) == whole
        assert site.sources(llama) == site.hit()
    assert not errors(caplog)


def test_a_purge_removes_the_page_and_the_place_is_the_next_ones(
    site: Site, llama: LlamaForCausalLM, other: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    site.fill(llama)
    assert len(site.pages()) == 1
    assert main(["verify", site.place]) == 0
    assert main(["purge", site.place, "--all"]) == 0
    assert not site.pages()
    site.fill(other)
    assert site.sources(other) == site.hit()
    assert not errors(caplog)
    assert site.sources(llama) == site.miss()


def test_a_page_that_was_replaced_while_an_engine_runs_is_seen(
    shared_site: Site,
    llama: LlamaForCausalLM,
    other: LlamaForCausalLM,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_guard, "CHECK_S", 0.0)
    first = shared_site.start(llama)
    first.run(shared_site.prompt, 1)
    assert first.drain(WAIT_S)
    shared_site.page().unlink()
    second = shared_site.start(other)
    second.run(shared_site.prompt[:40], 1)
    second.drain(WAIT_S)
    assert not errors(caplog)
    stored = first.stats()[f"tier.0.{shared_site.tier}.stored_blocks"]
    first.run(shared_site.prompt[::-1], 1)
    first.drain(WAIT_S)
    assert first.stats()[f"tier.0.{shared_site.tier}.stored_blocks"] == stored
    assert len(errors(caplog)) == 1


def test_a_model_that_changes_has_a_page_of_its_own(
    site: Site, llama: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(llama)
    engine = site.start(model)
    engine.run(site.prompt, 1)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2.0)
    engine.run(site.prompt, 1)
    assert engine.drain(WAIT_S)
    engine.shutdown()
    assert len(site.pages()) == 2
    assert site.sources(llama) == site.hit()
    assert not errors(caplog)


def test_after_a_reset_no_page_is_needed(
    site: Site, llama: LlamaForCausalLM, other: LlamaForCausalLM
) -> None:
    site.fill(llama)
    engine = site.start(other)
    engine.reset()
    engine.run(site.prompt, 1)
    assert engine.drain(WAIT_S)
    assert engine.stats()[f"tier.0.{site.tier}.stored_blocks"] > 0
