"""The name that the installed transformers gives the argument with the cache: ``cache`` since 5.24."""

import inspect

from transformers import LlamaForCausalLM

CACHE_NAME = (
    "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
)
