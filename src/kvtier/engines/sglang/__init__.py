"""kvtier under SGLang: a storage backend for HiCache, chosen with JSON flags of SGLang's own.

``--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvtier", "module_path":
"kvtier.engines.sglang", "class_name": "KVTierStorage", "interface_v1": 1, "tier": {"type": "fs", ...}}'``;
``docs/guide/sglang.md`` has the rest. Without SGLang the settings and the rule of hits can be imported, for documents.
"""

try:
    import sglang  # noqa: F401 - checks that it is installed
except ModuleNotFoundError:
    __all__: list[str] = []
else:
    from kvtier.engines.sglang.storage import KVTierStorage

    __all__ = ["KVTierStorage"]
