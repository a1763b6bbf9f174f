"""The JSON flags for vLLM in README and docs are JSON, and kvtier knows every setting in them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import parse_settings
from kvtier.tiering.base import COMMON_SETTINGS
from kvtier.tiering.factory import TIERS, own_setting_names
from scripts.check_docs import pages

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"--kv-transfer-config '(\{.*?\})'$", re.MULTILINE | re.DOTALL)
FLAGS = [
    (page.relative_to(ROOT), json.loads(found[1]))
    for page in pages(ROOT)
    for found in FLAG.finditer(page.read_text(encoding="utf-8"))
]
OURS = [(str(page), flag) for page, flag in FLAGS if flag["kv_connector"] == "KVTierConnector"]


def test_readme_and_the_page_about_vllm_show_the_flag() -> None:
    assert {"README.md", "docs/guide/vllm.md"} <= {page for page, _ in OURS}


@pytest.mark.parametrize(("page", "flag"), OURS)
def test_kvtier_knows_every_setting_of_a_flag(page: str, flag: dict[str, Any]) -> None:  # Any: JSON
    settings = parse_settings(flag["kv_connector_extra_config"])

    for tier in settings.secondary_tiers:
        own = own_setting_names(TIERS.resolve(tier["type"]))
        assert set(tier) - {"type"} <= own | COMMON_SETTINGS, page
