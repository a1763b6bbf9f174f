"""kvtier under vLLM: one connector, chosen with a JSON flag of vLLM's own.

``--kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
"kv_connector_extra_config": {"cpu_bytes_to_use": "8GiB"}}'``; ``docs/guide/vllm.md`` has the rest.
"""

from kvtier.errors import MissingExtraError

try:
    import vllm  # noqa: F401 - checks that it is installed
except ImportError as error:
    raise MissingExtraError(error.name or "vllm", "vllm") from error

from kvtier.engines.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector"]
