"""The embedded engine: any local causal language model of transformers, served from a tiered KV cache.

``KVTierEngine`` has a paged pool of device blocks with a prefix cache. It finds the prefix that a prompt shares with
earlier ones on the device, in host memory or in a secondary tier, and computes only the rest:

    config = EngineConfig(num_device_blocks=256, extra_config={"cpu_bytes_to_use": "1GiB"})
    engine = KVTierEngine(model, config)
    stream = engine.generate(token_ids, max_new_tokens=32)
    for token in stream:
        ...
    stream.result.sources        # {"device": 512, "host": 1024, "computed": 37}

``KVTierCache`` does the same for programs that call ``model.generate``. Requests are served one after another, without
batching and tensor parallelism.
"""

from kvtier.errors import MissingExtraError

try:
    import torch  # noqa: F401 - checks that it is installed
    import transformers  # noqa: F401 - checks that it is installed
except ImportError as error:
    raise MissingExtraError(error.name or "transformers", "transformers") from error

from kvtier.engines.transformers.cache import KVTierCache
from kvtier.engines.transformers.config import EngineConfig
from kvtier.engines.transformers.engine import KVTierEngine
from kvtier.engines.transformers.result import GenerationResult, TokenStream

__all__ = ["EngineConfig", "GenerationResult", "KVTierCache", "KVTierEngine", "TokenStream"]
