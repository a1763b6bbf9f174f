"""kvtier under vLLM: one connector, chosen with a JSON flag of vLLM's own.

``--kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.engines.vllm",
"kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "8GiB"}}'``; ``docs/vllm.md`` has the rest.
"""

from kvtier.engines.vllm import requirements as requirements  # isort: skip
from kvtier.engines.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector"]
