"""Tiny models of every kind of mask and rope; their random weights make attention choose between tokens."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

VOCABULARY = 97
IMAGE_TOKEN_ID = 90
ORIGINAL_LENGTH = 64
"""Length up to which ropes that depend on the length of a sequence are those of the training."""

SIZES: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BERT_SIZES: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION: Mapping[str, object] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}

LONG_FACTORS = [4.0, 4.5, 5.0, 6.0, 7.0, 8.0]
ROPES: Mapping[str, Mapping[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4],
        "long_factor": LONG_FACTORS,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
    "proportional": {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.5},
}
"""Every type of ``ROPE_INIT_FUNCTIONS``, and the default one."""

MakeModel = Callable[[], PreTrainedModel]


def make_llama(rope: str) -> PreTrainedModel:
    """Return a Llama with one of ``ROPES``; the weights of all are equal."""
    # A dynamic rope takes the length of the training from here, and nothing else reads it.
    length = ORIGINAL_LENGTH if rope == "dynamic" else 4 * ORIGINAL_LENGTH
    parameters = {"rope_theta": 10_000.0, **ROPES[rope]}
    return build_model(
        LlamaForCausalLM,
        LlamaConfig,
        {**SIZES, "rope_parameters": parameters, "max_position_embeddings": length},
    )


def make_phi3() -> PreTrainedModel:
    """Return a Phi-3 with LongRoPE, whose own ``generate`` drops a cache that grows over the original length."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    parameters = {"rope_theta": 10_000.0, **ROPES["longrope"]}
    del parameters["factor"]
    return build_model(
        Phi3ForCausalLM,
        Phi3Config,
        {
            **sizes,
            "rope_parameters": parameters,
            "max_position_embeddings": 4 * ORIGINAL_LENGTH,
            "original_max_position_embeddings": ORIGINAL_LENGTH,
        },
    )


def make_gemma3(full_attention: str = "linear", *, is_bidirectional: bool = False) -> PreTrainedModel:
    """Return a Gemma-3 with windows, whose kinds of layers have ropes of their own."""
    length = ORIGINAL_LENGTH if full_attention == "dynamic" else 4 * ORIGINAL_LENGTH
    return build_model(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            **SIZES,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "max_position_embeddings": length,
            "query_pre_attn_scalar": 12,
            "use_bidirectional_attention": is_bidirectional,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
                "full_attention": {"rope_theta": 10_000.0, **ROPES[full_attention]},
            },
        },
    )


def make_mistral() -> PreTrainedModel:
    """Return a model whose every layer has a sliding window."""
    return build_model(MistralForCausalLM, MistralConfig, {**SIZES, "sliding_window": 20})


def make_llama4() -> PreTrainedModel:
    """Return a model with chunked attention, layers without rope, and queries scaled by position."""
    return build_model(
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            **SIZES,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 20,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0, 1],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "floor_scale": 16,
            "attn_scale": 0.5,
            "max_position_embeddings": 512,
        },
    )


def make_gemma(*, is_bidirectional: bool) -> PreTrainedModel:
    """Return a Gemma, with the flag that makes an encoder of it."""
    return build_model(
        GemmaForCausalLM, GemmaConfig, {**SIZES, "use_bidirectional_attention": is_bidirectional}
    )


def make_bloom() -> PreTrainedModel:
    """Return a model without positions but for the biases of ALiBi."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return build_model(BloomForCausalLM, BloomConfig, sizes | ids | {"tie_word_embeddings": False})


def make_bert(*, is_decoder: bool) -> PreTrainedModel:
    """Return a BERT with a language head, causal or not."""
    return build_model(BertLMHeadModel, BertConfig, {**BERT_SIZES, "is_decoder": is_decoder})


def make_roberta(*, is_decoder: bool) -> PreTrainedModel:
    """Return a RoBERTa with a language head, causal or not."""
    return build_model(RobertaForCausalLM, RobertaConfig, {**BERT_SIZES, "is_decoder": is_decoder})


def make_gemma3_with_images() -> PreTrainedModel:
    """Return a Gemma-3 whose image tokens see each other."""
    text = {**SIZES, "query_pre_attn_scalar": 12, "sliding_window": 16}
    return build_model(
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {
            "text_config": text,
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE_TOKEN_ID,
            "boi_token_index": 91,
            "eoi_token_index": 92,
            "initializer_range": 0.2,
        },
    )


def make_paligemma() -> PreTrainedModel:
    """Return a PaliGemma, whose whole prompt sees itself."""
    return build_model(
        PaliGemmaForConditionalGeneration,
        PaliGemmaConfig,
        {
            "text_config": {**SIZES, "model_type": "gemma"},
            "vision_config": {**VISION, "model_type": "siglip_vision_model", "projection_dim": 48},
            "image_token_index": IMAGE_TOKEN_ID,
            "projection_dim": 48,
        },
    )


def make_bart() -> PreTrainedModel:
    """Return an encoder with a decoder."""
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    return build_model(BartForConditionalGeneration, BartConfig, sizes)


def build_model(model: type, config: type, settings: Mapping[str, object]) -> PreTrainedModel:
    """Return a model with seeded weights, in evaluation mode."""
    torch.manual_seed(0)
    built = model(
        config(**cast("Any", dict(settings)))
    )  # Any: transformers annotates each model's own settings
    assert isinstance(built, PreTrainedModel)
    built.train(mode=False)
    return built
