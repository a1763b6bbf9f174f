"""What is known of the weights after each of vLLM's calls; in doubt they are unknown."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from torch import nn

from kvtier.engines.vllm.loaded_weights import (
    AS_STARTED,
    UNKNOWN,
    LoadedWeights,
    Origin,
    Weights,
    digest_model,
)

TRANSFER = Weights(Origin.TRANSFER)
Calls = list[tuple[str, dict[str, Any]]]  # Any: arguments of a user's call

UPDATE: Calls = [
    ("start_weight_update", {}),
    ("update_weights", {"update_info": {}}),
    ("finish_weight_update", {}),
]
DRAFT_UPDATE: Calls = [("start_draft_weight_update", {}), *UPDATE[1:]]


def follow(calls: Calls, weights: LoadedWeights | None = None) -> LoadedWeights:
    """Let calls to all workers end well."""
    weights = weights or LoadedWeights()
    for method, kwargs in calls:
        weights.on_call(method, (), kwargs)
    return weights


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("profile", {}), ("add_lora", {}), ("a_method_of_an_extension", {})], AS_STARTED),
        ([("reload_weights", {})], Weights(Origin.FILES)),
        ([("reload_weights", {"weights_path": "/new"})], Weights(Origin.FILES, "/new")),
        (
            [("reload_weights", {"weights_path": "/new"}), ("reload_weights", {})],
            Weights(Origin.FILES, "/new"),
        ),
        ([("reload_weights", {"weights_iterator": iter(())})], TRANSFER),
        ([("reload_weights", {"is_checkpoint_format": False})], TRANSFER),
        ([("update_config", {"overrides": {}}), ("reload_weights", {})], TRANSFER),
        (UPDATE[:1], UNKNOWN),
        (UPDATE[:2], UNKNOWN),
        (UPDATE, TRANSFER),
        (DRAFT_UPDATE, UNKNOWN),
        ([("reset_weights", {})], UNKNOWN),
    ],
)
def test_each_call_says_where_the_weights_come_from(calls: Calls, expected: Weights) -> None:
    weights = follow(calls)

    assert weights.now == expected
    assert weights.is_identified == (expected == AS_STARTED)


def test_a_load_that_failed_leaves_unknown_weights() -> None:
    weights = LoadedWeights()

    assert weights.on_call("reload_weights", (), {}, has_failed=True)

    assert weights.now == UNKNOWN


@pytest.mark.parametrize(("level", "expected"), [(1, AS_STARTED), (2, UNKNOWN)])
def test_only_sleep_that_discards_weights_makes_them_unknown(level: int, expected: Weights) -> None:
    weights = LoadedWeights()

    weights.on_sleep(level)

    assert (weights.now, weights.is_asleep) == (expected, True)


def test_during_sleep_any_call_that_is_not_known_may_change_weights() -> None:
    weights = LoadedWeights()
    weights.on_sleep(1)

    assert not weights.on_call("profile", (), {})
    assert weights.now == AS_STARTED
    assert weights.on_call(lambda worker: worker, (), {})
    assert weights.now == UNKNOWN


class Model(nn.Module):
    """One weight and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(()))


def test_a_digest_covers_every_weight_and_buffer() -> None:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    first = digest_model(model)

    with torch.no_grad():
        model.linear.weight[3, 3] += 1
    second = digest_model(model)
    with torch.no_grad():
        model.scale += 1

    assert len({first, second, digest_model(model)}) == 3


def test_a_model_whose_weights_were_packed_elsewhere_has_no_digest() -> None:
    model = Model()
    model.linear.weight = nn.Parameter(torch.empty(0))

    assert digest_model(model) == ""
