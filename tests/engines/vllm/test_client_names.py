"""A name that a client gives an image may stand for another image after a restart: its blocks end with the process."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import numpy as np
import torch
from tests.engines.vllm.configs import NUM_BLOCKS, cache_config, full, group, with_kvtier
from tests.engines.vllm.mini_engine import MAX_STEPS, MiniEngine
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvtier.engines import vllm_plugin
from kvtier.engines.vllm.scheduler_hooks import MEDIA_DIGEST, has_client_names
from kvtier.observe.why import explain_records

PROMPT = tuple(range(50))
"""Three full blocks of sixteen tokens, and two tokens."""

OWN = hashlib.sha256(b"the image's bytes").hexdigest()
"""What vLLM calls an image by its bytes."""


@pytest.fixture
def start(vllm_config: VllmConfig, tmp_path: Path) -> Iterator["Start"]:
    """Return what starts engines that share a folder; they end with the test."""
    starter = Start(vllm_config, tmp_path / "blocks")
    yield starter
    starter.shutdown()


class Start:
    """Starts engines, one after the other, on one folder."""

    def __init__(self, vllm_config: VllmConfig, folder: Path) -> None:
        self._vllm_config = vllm_config
        self._tier = {"type": "fs", "root_dir": str(folder), "capacity_bytes": "64MiB"}
        self._engines: list[MiniEngine] = []

    def __call__(self, **settings: object) -> MiniEngine:
        """End the engine before and start another one."""
        self.shutdown()
        config = with_kvtier(
            self._vllm_config, secondary_tiers=[self._tier], lookup_deadline_s=600, **settings
        )
        config.kv_transfer_config.engine_id = "the-same-one"
        caches = {"a": torch.ones(NUM_BLOCKS, 2, 16, 16)}
        self._engines.append(MiniEngine(config, cache_config(group(full(), "a")), caches))
        return self._engines[-1]

    def shutdown(self) -> None:
        """End the engine that runs."""
        for engine in self._engines:
            engine.shutdown()
        self._engines.clear()


def ask(engine: MiniEngine, name: str, mm_hash: str, identifier: str | None = None) -> Request:
    """Return a request with an image within the second block."""
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier or mm_hash,
        mm_position=PlaceholderRange(offset=20, length=8),
        mm_hash=mm_hash,
    )
    return Request(
        request_id=name,
        prompt_token_ids=list(PROMPT),
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        mm_features=[feature],
        block_hasher=engine.hash_block,
    )


def store(engine: MiniEngine, request: Request) -> None:
    """Compute a request's blocks and wait until they are on the disk."""
    engine.compute(request, [[1, 2, 3, 4]], len(PROMPT))
    manager: Any = engine.scheduler._scheduler.manager  # Any: one with tiers behind it
    assert manager.drain(600.0)


def find(engine: MiniEngine, request: Request) -> int:
    """Return the tokens that are found of a request."""
    for _ in range(MAX_STEPS):
        num_tokens, _ = engine.scheduler.get_num_new_matched_tokens(request, 0)
        if num_tokens is not None:
            return int(num_tokens)
        engine.step()
    raise AssertionError("a lookup never ends")


def test_the_process_that_stored_blocks_under_a_clients_name_finds_them_and_the_next_one_does_not(
    start: Start,
) -> None:
    engine = start()
    store(engine, ask(engine, "first", "u7"))
    assert find(engine, ask(engine, "second", "u7")) == 48

    engine = start()
    last = ask(engine, "third", "u7")
    assert find(engine, last) == 0
    engine.allocate(last, [[1, 2, 3, 4]], 0)
    engine.scheduler.request_finished(last, [])
    (finding, *_) = explain_records(engine.scheduler._scheduler.records.latest[-1:]).findings
    assert "client_names" in finding.text


def test_an_image_that_vllm_has_named_by_its_bytes_is_found_after_a_restart(start: Start) -> None:
    engine = start()
    store(engine, ask(engine, "first", OWN))

    engine = start()
    assert find(engine, ask(engine, "second", OWN)) == 48


def test_clients_whose_names_are_trusted_find_their_blocks_after_a_restart(start: Start) -> None:
    engine = start(trust_multi_modal_uuids=True)
    store(engine, ask(engine, "first", "u7"))

    engine = start(trust_multi_modal_uuids=True)
    assert find(engine, ask(engine, "second", "u7")) == 48
    engine = start()
    assert find(engine, ask(engine, "third", "u7")) == 0


@pytest.mark.parametrize("name", ["u7", "", OWN[:-1], OWN.upper(), f"client-{OWN}", f"{OWN}\n"])
def test_what_is_no_digest_of_vllms_is_a_clients_name(start: Start, name: str) -> None:
    assert has_client_names(ask(start(), "first", name or " "))


def test_an_adapter_before_an_images_own_name_makes_it_no_clients_name(start: Start) -> None:
    assert not has_client_names(ask(start(), "first", OWN, f"adapter:{OWN}"))


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_each_of_vllms_hashers_gives_what_is_taken_for_its_own(algorithm: str) -> None:
    (made,) = hash_images(algorithm, None, {})
    assert MEDIA_DIGEST.fullmatch(made)


@pytest.fixture
def marked(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a configuration of a model with images as the plug-in does, and take back what that changes."""
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", ProcessorInputs.get_mm_hashes)
    config = with_kvtier(vllm_config)
    config.model_config.multimodal_config = MultiModalConfig()
    vllm_plugin.check_before_start(config)
    vllm_plugin.check_before_start(config)


@pytest.mark.usefixtures("marked")
def test_a_clients_name_stays_one_where_vllm_hashes_it_with_the_processors_settings() -> None:
    (hidden,) = hash_images("blake3", ["u7"], {"do_normalize": False})
    (other,) = hash_images("blake3", ["u8"], {"do_normalize": False})
    (own,) = hash_images("blake3", [None], {"do_normalize": False})
    (plain,) = hash_images("blake3", ["u7"], {})

    assert not MEDIA_DIGEST.fullmatch(hidden)
    assert hidden != other
    assert MEDIA_DIGEST.fullmatch(own)
    assert plain == "u7"


def hash_images(algorithm: str, names: list[str | None] | None, settings: dict[str, object]) -> list[str]:
    """Return what vLLM calls an image of a request, whose client has given it a name or not."""
    items: MultiModalDataItems = MultiModalDataParser().parse_mm_data(
        {"image": [np.zeros((3, 4, 4), dtype=np.uint8)]}
    )
    given = None if names is None else {"image": names}
    inputs = ProcessorInputs([1], items, given, hf_processor_mm_kwargs=settings)
    return list(inputs.get_mm_hashes("model", algorithm)["image"])
