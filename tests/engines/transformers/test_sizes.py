"""``kvtier size`` reads from a configuration what the engine measures on a model that was built from it."""

import pytest
from tests.engines.transformers.tiny_models import build_tiny_model

from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.errors import ConfigError
from kvtier.sim.model_shape import shape_of_config
from kvtier.sim.state_shape import FAMILIES

ALSO_BUILT = ("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Architectures that are known by their fields and not by their type."""

NOT_SERVED = frozenset({"minimax", "minimax_m1", "minimax_text_01"})
"""Architectures that the engine refuses, or that transformers does not have."""


@pytest.mark.parametrize("model_type", sorted({*FAMILIES, *ALSO_BUILT} - NOT_SERVED))
def test_the_size_of_a_configuration_is_what_the_engine_measures(model_type: str) -> None:
    model = build_tiny_model(model_type)
    measured = ModelAdapter(model).shape

    found = shape_of_config(model.config.to_dict() | {"dtype": "float32"})

    assert found.states is not None
    in_attention = sum(group.num_layers * group.bytes_per_token for group in found.layers)
    assert in_attention == measured.token_bytes
    assert found.states.bytes_in_transformers == measured.state_bytes
    assert found.states.num_layers == len({state.layer_name for state in measured.states})


@pytest.mark.parametrize(("model_type", "field"), [("zaya", "layer_types"), ("inkling_text", "layer_types")])
def test_a_hybrid_of_an_unknown_kind_is_refused_with_its_field(model_type: str, field: str) -> None:
    config = build_tiny_model(model_type).config.to_dict() | {"dtype": "float32"}

    with pytest.raises(ConfigError, match=f"{field}=.*is not supported"):
        shape_of_config(config)
