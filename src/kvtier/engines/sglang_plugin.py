"""What SGLang calls in each of its processes once kvtier is installed: the entry point in ``sglang.srt.plugins``.

With the environment variable ``KVTIER_SGLANG`` set to kvtier's settings, a server started with no other flag keeps its
pages in kvtier: HiCache is switched on with kvtier as its storage backend, and the settings are checked before a model
is loaded. Without the variable nothing happens, and nothing of kvtier but this file is imported.

Source: ``sglang.srt.plugins`` and ``ServerArgs`` of SGLang 0.5.23, which resolves arguments only after they are made.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

VARIABLE = "KVTIER_SGLANG"
"""Has kvtier's settings as JSON, or ``@`` and the path of a file with them."""

ARGUMENTS = "sglang.srt.server_args.ServerArgs"

BACKEND = {
    "backend_name": "kvtier",
    "module_path": "kvtier.engines.sglang",
    "class_name": "KVTierStorage",
    "interface_v1": 1,
}
"""What SGLang reads of the JSON that a dynamic backend is described by."""


def register() -> None:
    """Have arguments of SGLang's completed, if the variable is set."""
    if os.environ.get(VARIABLE):
        HookRegistry.register(f"{ARGUMENTS}.__post_init__", switch_on, HookType.AFTER)


def switch_on(result: object, server_args: "ServerArgs") -> None:
    """Switch HiCache on with kvtier behind it.

    Raises:
        ConfigError: the variable has no settings, or a flag names another backend; or a setting cannot work.
        UnknownNameError: an unknown setting or tier.
    """
    from kvtier.engines.sglang.settings import parse_extra_config
    from kvtier.errors import ConfigError

    del result
    backend = server_args.hicache_storage_backend
    if backend is not None:
        remedy = f"--hicache-storage-backend {backend} names another backend: leave one of the two out"
        raise ConfigError(VARIABLE, os.environ[VARIABLE], remedy, max_value_chars=80)
    settings = read_settings(os.environ[VARIABLE])
    parse_extra_config(settings)
    server_args.enable_hierarchical_cache = True
    server_args.hicache_storage_backend = "dynamic"
    server_args.hicache_storage_backend_extra_config = json.dumps(BACKEND | settings)


def read_settings(value: str) -> dict[str, Any]:  # Any: JSON of the user
    """Return the settings that the variable has, or the file that it names.

    Raises:
        ConfigError: they are no JSON object, or the file cannot be read.
    """
    from kvtier.errors import ConfigError
    from kvtier.input_files import parse_json, read_text_file

    form = 'must be settings such as {"tier": {"type": "fs", "root_dir": ...}}, or @ and the path of a file with them'
    found = read_text_file(VARIABLE, Path(value[1:])) if value.startswith("@") else value
    settings = parse_json(VARIABLE, value, found, form)
    if not isinstance(settings, dict):
        raise ConfigError(VARIABLE, value, form, max_value_chars=80)
    return settings
