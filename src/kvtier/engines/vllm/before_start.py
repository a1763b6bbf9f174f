"""The identity of an engine that has not started, as far as its arguments tell.

vLLM makes its configuration out of the same arguments as ``vllm serve``, and nothing is loaded. What only the model's
layers tell (groups, page sizes, the type of keys and values as they are kept) is not known before a start.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvtier.engines.vllm import compat
from kvtier.engines.vllm.config import ENGINE_KIND, check_supported, context_parallel_size, outlives_engine
from kvtier.engines.vllm.identity import make_model_identity
from kvtier.errors import ConfigError, KVTierError
from kvtier.namespace import model_in_words


def identify(
    arguments: str, extra_config: Mapping[str, Any]
) -> dict[str, Any]:  # Any: JSON, of a document's fields
    """Return the fields of a namespace's document that an engine with these arguments will have.

    Reads the weights' files, unless their digests are remembered.

    Args:
        arguments: as behind ``vllm serve``: the model, then options.
        extra_config: kvtier's settings, as the user wrote them.

    Raises:
        ConfigError: vLLM refuses the arguments, or kvtier refuses what they say.
        FingerprintError: a file of the weights cannot be read.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="--vllm", exit_on_error=False))
    try:
        words = shlex.split(arguments)
        if words and not words[0].startswith("-"):
            words.insert(0, "--model")
        engine_arguments = EngineArgs.from_cli_args(parser.parse_args(words))
        engine_arguments.kv_transfer_config = KVTransferConfig(
            kv_connector="KVTierConnector", kv_role="kv_both", kv_connector_extra_config=dict(extra_config)
        )
        vllm_config = engine_arguments.create_engine_config()
    except KVTierError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  # foreign: vLLM raises whatever its parts raise
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError("--vllm", arguments, f"vLLM refuses it: {first_line}") from None
    check_supported(vllm_config)
    parallel_config = vllm_config.parallel_config
    model = make_model_identity(vllm_config, outlives_engine=outlives_engine(vllm_config))
    return {
        "engine": ENGINE_KIND,
        "model": model_in_words(model),
        "hash_algorithm": str(vllm_config.cache_config.prefix_caching_hash_algo),
        "hash_seed": compat.hash_seed(vllm_config),
        "world_size": parallel_config.world_size,
        "tensor_parallel_size": parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": parallel_config.pipeline_parallel_size,
        "context_parallel_size": context_parallel_size(vllm_config),
    }
