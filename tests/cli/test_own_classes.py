"""The command line takes a policy and a tier that kvtier does not have, by class or by a package's entry point."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.own_classes import write_offers, write_package

ROOT = Path(__file__).parents[2]

TINY_DEMO = ("--cpu-bytes=2Mi", "--conversations=2", "--turns=2", "--document-tokens=200")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a package that offers its policy and its tier under names of their own."""
    folder = tmp_path / "packages"
    write_package(folder, "own_package")
    offers = {
        "kvtier.policies": {"mine": "own_package.parts:Mine"},
        "kvtier.tiers": {"folder": "own_package.parts:FolderTier"},
    }
    write_offers(folder, "own-package", offers)
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts on which LRU keeps what is asked for again and a policy that ignores uses does not."""
    path = tmp_path / "trace.jsonl"
    prompts = [[1, 2], [3, 4], [1, 2], [5, 6], [1, 2], [3, 4], [7, 8], [1, 2]]
    lines = (
        {"timestamp": 60_000 * minute, "input_length": 1024, "output_length": 0, "hash_ids": ids}
        for minute, ids in enumerate(prompts)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def kvtier(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that finds the packages as it would find installed ones."""
    search_path = os.pathsep.join([str(packages), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "kvtier", *arguments],
        env=os.environ | {"PYTHONPATH": search_path},
        cwd=packages.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def simulated(packages: Path, trace: Path, *arguments: str) -> dict[str, Any]:  # Any: JSON
    """Simulate with blocks of 512 KiB, two on the device and four in host memory; return results by policy."""
    numbers = packages.parent / "numbers.json"
    sizes = ["--kv-bytes-per-token", "1Ki", "--device", "1Mi", "--host", "2Mi"]
    done = kvtier(packages, "simulate", str(trace), *sizes, *arguments, "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(numbers.read_text())["results"]  # Any: as above
    return found


@pytest.mark.slow
def test_a_policy_of_one_s_own_is_simulated_in_other_processes_too(packages: Path, trace: Path) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")
    found = simulated(
        packages,
        trace,
        "--policy",
        "lru,mine,own_package.parts:Mine",
        "--jobs",
        "2",
        "--html",
        "page.html",
    )

    assert found["own_package.parts:Mine"] == found["mine"] != found["lru"]
    assert "own_package.parts:Mine" in (packages.parent / "page.html").read_text()


@pytest.mark.slow
def test_a_policy_of_one_s_own_orders_a_simulated_tier(packages: Path, trace: Path) -> None:
    tiers = ["--tier", "a:2Mi:1G/s", "--tier-setting", "a.policy=own_package.parts:Mine"]

    own = simulated(packages, trace, *tiers)
    offered = simulated(packages, trace, *tiers[:3], "a.policy=mine")
    lru = simulated(packages, trace, *tiers[:2])

    assert own == offered != lru


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "TRACE", "--policy", "lru,own_package.parts:Mien"],
        ["simulate", "TRACE", "--tier", "a:2Gi:1G/s", "--tier-setting", "a.policy=own_package.parts:Mien"],
        ["demo", "--tier", "own_package.parts:Mien"],
    ],
)
def test_a_class_that_is_not_there_is_one_line_that_names_the_option(
    packages: Path, trace: Path, arguments: Sequence[str]
) -> None:
    done = kvtier(packages, *(str(trace) if word == "TRACE" else word for word in arguments))

    option = next(word for word in reversed(arguments) if word.startswith("--"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"for {option}" in done.stderr
    assert "module 'own_package.parts' has no 'Mien': correct the name of the class" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["own_package.parts:FolderTier", "folder"])
def test_the_demo_runs_on_a_tier_of_one_s_own_and_finds_its_blocks_after_the_restart(
    packages: Path, tier: str
) -> None:
    pytest.importorskip("transformers", reason="pip install 'kvtier[demo]'")
    from kvtier.engines.transformers.local_model import make_random_llama

    numbers, blocks, model = (packages.parent / name for name in ("numbers.json", "blocks", "model"))
    make_random_llama(2, 256, 1).save_pretrained(model)
    place = ["--dir", str(blocks), "--tier-setting", "suffix=.block", "--json", str(numbers)]

    done = kvtier(packages, "demo", *TINY_DEMO, "--model", str(model), "--tier", tier, *place)

    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text())
    assert found["tier"] == "folder"
    assert found["identical"]
    assert found["restart"]["tier_ratio"] >= 0.8
    assert list(blocks.rglob("*.block"))


def test_a_setting_that_the_demo_s_tier_does_not_have_is_refused_before_the_model_is_built(
    packages: Path,
) -> None:
    done = kvtier(packages, "demo", "--tier", "own_package.parts:FolderTier", "--tier-setting", "sufix=.b")

    assert done.returncode == 2
    assert (
        "unknown setting of tier 'own_package.parts:FolderTier' 'sufix': did you mean 'suffix'?"
        in done.stderr
    )
