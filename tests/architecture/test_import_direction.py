"""Imports of the package point down its layers, and the rule that says so has teeth."""

from pathlib import Path

import pytest

from scripts.import_direction import Import, objection, tier_names, violations

SOURCE = Path(__file__).parents[2] / "src"
TIERS = frozenset({"example", "fs", "obj"})


@pytest.mark.slow
def test_the_package_breaks_no_rule() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("kvtier.base", "kvtier.cpu.common.CPULoadStoreSpec"),
        ("kvtier.base", "kvtier.worker.worker.OffloadingHandler"),
        ("kvtier.errors", "kvtier.factory.OffloadingSpecFactory"),
        ("kvtier.worker.worker", "kvtier.cpu.manager.CPUOffloadingManager"),
        ("kvtier.cpu.manager", "kvtier.tiering.base.JobResult"),
        ("kvtier.tiering.spec", "kvtier.connector.common.TransferJob"),
        ("kvtier.connector.scheduler", "kvtier.engines.transformers.engine.KVTierEngine"),
        ("kvtier.connector.scheduler", "kvtier.recording.recorder.open_recorder"),
        ("kvtier.connector.scheduler", "kvtier.engines.common.step.StepOutput"),
        ("kvtier.recording.recorder", "kvtier.observe.metrics.Family"),
        ("kvtier.sim.engine", "kvtier.engines.transformers.engine.KVTierEngine"),
        ("kvtier.engines.common.step", "kvtier.sim.trace.Trace"),
        ("kvtier.engines.common.step", "kvtier.engines.transformers.request.Request"),
        ("kvtier.engines.common.step", "kvtier.cpu.common.CPULoadStoreSpec"),
        ("kvtier.engines.common.block_pool", "torch"),
        ("kvtier.engines.transformers.engine", "kvtier.cli.main"),
        ("kvtier.__main__", "kvtier.tiering.manager"),
        ("kvtier.engines.transformers.engine", "kvtier.sim.trace"),
        ("kvtier.engines.transformers.engine", "kvtier.testing.clock.ManualClock"),
        ("kvtier.cpu.manager", "kvtier.OffloadKey"),
        ("kvtier", "kvtier.cpu.manager.CPUOffloadingManager"),
        ("kvtier.tiering.fs.tier", "kvtier.tiering.obj.client"),
        ("kvtier.tiering.fs.tier", "kvtier.tiering.manager.TieringOffloadingManager"),
        ("kvtier.tiering.fs.tier", "kvtier.cpu.manager.CPUOffloadingManager"),
        ("kvtier.tiering.fs.tier", "kvtier.registry.Registry"),
        ("kvtier.tiering.factory", "kvtier.tiering.fs.tier.FsTier"),
        ("kvtier.connector.load_or_compute", "kvtier.tiering.locate.TierBlockLocator"),
        ("kvtier.tiering.cascade", "kvtier.cpu.policies.hazard.forecaster.HazardForecaster"),
        ("kvtier.tiering.cascade", "kvtier.cpu.policies.registry.create_cache_policy"),
        ("kvtier.tiering.fs.tier", "kvtier.cpu.policies.lru.LRUCachePolicy"),
        ("kvtier.base", "torch"),
        ("kvtier.cpu.manager", "torch"),
        ("kvtier.cpu.policies.lru", "torch.cuda"),
        ("kvtier.cli.demo.command", "torch"),
        ("kvtier.connector.scheduler", "torch"),
        ("kvtier.tiering.fs.tier", "xxhash"),
        ("kvtier.tiering.fs.tier", "redis"),
        ("kvtier.connector.worker", "vllm.config"),
        ("kvtier.cpu.manager", "typer"),
        ("kvtier.cpu.manager", "pandas"),
    ],
)
def test_an_import_against_the_rules_is_refused(module: str, target: str) -> None:
    assert objection(Import(module, target, 1), TIERS)


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("kvtier.cli.main", "kvtier.engines.transformers.engine.KVTierEngine"),
        ("kvtier.cli.main", "kvtier.__version__"),
        ("kvtier.__main__", "kvtier.cli.main.main"),
        ("kvtier.connector.offloading_connector", "kvtier.factory.OffloadingSpecFactory"),
        ("kvtier.recording.recorder", "kvtier.connector.protocols.RequestRecorder"),
        ("kvtier.engines.vllm.connector", "kvtier.recording.recorder.open_recorder"),
        ("kvtier.engines.common.step", "kvtier.connector.common.OffloadingWorkerMetadata"),
        ("kvtier.engines.common.block_pool", "kvtier.errors.DevicePoolError"),
        ("kvtier.sim.engine", "kvtier.engines.common.step.StepOutput"),
        ("kvtier.engines.transformers.scheduler", "kvtier.engines.common.step.StepOutput"),
        ("kvtier.tiering.spec", "kvtier.cpu.spec.CPUOffloadingSpec"),
        ("kvtier.tiering.fs.tier", "kvtier.tiering.fs.store.FileStore"),
        ("kvtier.tiering.fs.tier", "kvtier.cpu.policies.registry.create_cache_policy"),
        ("kvtier.tiering.fs.tier", "kvtier.tiering.kit.threaded_tier.ThreadedTier"),
        ("kvtier.tiering.fs.tier", "kvtier.tiering.kit.io_pool.IoPool"),
        ("kvtier.tiering.fs.tier", "kvtier.tiering.kit.health.Counters"),
        ("kvtier.tiering.fs.tier", "kvtier.namespace.make_namespace"),
        ("kvtier.tiering.manager", "kvtier.tiering.transfers.OpenJobs"),
        ("kvtier.tiering.primary", "kvtier.cpu.policies.registry.create_cache_policy"),
        ("kvtier.tiering.cascade", "kvtier.cpu.policies.learning.ReuseForecast"),
        ("kvtier.tiering.example", "kvtier.cpu.policies.create_cache_policy"),
        ("kvtier.connector.load_or_compute", "kvtier.locations.BlockPlace"),
        ("kvtier.base", "kvtier.config.OffloadingConfig"),
        ("kvtier", "kvtier.factory.OffloadingSpecFactory"),
        ("kvtier.testing.tiers", "kvtier.tiering.base.JobResult"),
        ("kvtier.engines.transformers.engine", "torch.nn"),
        ("kvtier.cpu.gpu_worker", "torch"),
        ("kvtier.cpu.manager", "numpy.typing"),
        ("kvtier.cpu.manager", "collections.abc"),
    ],
)
def test_an_import_downwards_is_allowed(module: str, target: str) -> None:
    assert objection(Import(module, target, 1), TIERS) is None


def test_the_contract_of_a_kv_cache_names_torch_for_types_only() -> None:
    assert objection(Import("kvtier.handler", "torch", 1, is_for_types=True), TIERS) is None
    assert objection(Import("kvtier.cpu.manager", "torch", 1, is_for_types=True), TIERS)


def test_a_folder_of_tiering_is_a_tier_and_a_module_or_the_kit_is_not() -> None:
    modules = ["kvtier.tiering", "kvtier.tiering.manager", "kvtier.tiering.fs", "kvtier.tiering.fs.store"]

    assert tier_names([*modules, "kvtier.tiering.kit.io_pool"]) == {"example", "fs"}


def write_package(root: Path, **texts: str) -> None:
    """Write modules of a package named kvtier; ``__`` in a name stands for a folder."""
    for name, text in texts.items():
        path = root / "kvtier" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "from kvtier.cpu.manager import X\n",
        "from ..cpu import manager\n",
        "import kvtier.cpu.manager\n",
        "def f():\n    from kvtier.cpu import manager\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvtier.cpu import manager\n",
    ],
)
def test_an_import_counts_wherever_and_however_it_is_written(tmp_path: Path, text: str) -> None:
    write_package(tmp_path, worker__worker=text, cpu__manager="")

    (message,) = violations(tmp_path)

    assert message.endswith("worker is below cpu")


def test_a_circle_is_found_even_when_half_of_it_hides_in_a_function(tmp_path: Path) -> None:
    write_package(
        tmp_path,
        cpu__a="from kvtier.cpu import b\n",
        cpu__b="def f():\n    from kvtier.cpu.a import X\n",
    )

    assert violations(tmp_path) == ["circle of imports: kvtier.cpu.a -> kvtier.cpu.b -> kvtier.cpu.a"]


def test_a_package_that_re_exports_its_modules_is_no_circle(tmp_path: Path) -> None:
    (tmp_path / "kvtier" / "cpu").mkdir(parents=True)
    (tmp_path / "kvtier" / "cpu" / "__init__.py").write_text("from kvtier.cpu.a import X\n", encoding="utf-8")
    write_package(tmp_path, cpu__a="from kvtier.cpu import b\n", cpu__b="")

    assert violations(tmp_path) == []


def test_what_is_imported_for_types_alone_makes_no_circle(tmp_path: Path) -> None:
    write_package(
        tmp_path,
        cpu__a="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvtier.cpu import b\n",
        cpu__b="from kvtier.cpu.a import X\n",
    )

    assert violations(tmp_path) == []
