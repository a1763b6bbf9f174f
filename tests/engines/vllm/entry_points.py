"""kvtier's entry points as pip installs them, in a folder: a checkout may be newer than what is installed of it."""

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
GROUP = "vllm.general_plugins"


def install_entry_points(folder: Path) -> str:
    """Write a distribution that has the entry points of pyproject.toml; return a PYTHONPATH that begins with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = folder / "kvtier_checkout-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-checkout\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"][GROUP].items()]
    (found / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
