"""Offloading specs: found by name or module, implied by the settings, derived values, refusals."""

from collections.abc import Iterator

import pytest

from kvtier.base import CanonicalKVCaches, HandlerEntry, OffloadingManager, OffloadingSpec
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.conflicts import DEFAULT_SPEC, TIERING_SPEC
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.errors import ConfigError, DuplicateNameError, UnknownNameError
from kvtier.factory import OffloadingSpecFactory
from kvtier.registry import Registry


class FakeSpec(OffloadingSpec):
    """A spec of the user's own."""

    def get_manager(self) -> OffloadingManager:
        return CPUOffloadingManager(1)

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        return iter(())


class ImpliedTieringSpec(FakeSpec):
    """Stands for the tiering spec."""


class FactoryOfFakes(OffloadingSpecFactory):
    """The factory with a table of its own, so that no test registers in the shared one."""

    _registry = Registry(
        "offloading spec",
        {DEFAULT_SPEC: f"{__name__}:FakeSpec", TIERING_SPEC: f"{__name__}:ImpliedTieringSpec"},
    )


def make_config(*block_sizes: int, **extra_config: object) -> OffloadingConfig:
    return OffloadingConfig(
        engine_id="engine",
        model=ModelIdentity("model"),
        groups=tuple(
            KVGroup(size, (f"layer.{index}",), 64) for index, size in enumerate(block_sizes or (16,))
        ),
        hash_block_size=8,
        extra_config=extra_config,
    )


def test_a_spec_derives_its_sizes_from_the_configuration() -> None:
    config = make_config(16, block_size=64)
    spec = FakeSpec(config)
    assert spec.config is config
    assert spec.extra_config == {"block_size": 64}
    assert (spec.hash_block_size, spec.gpu_block_size, spec.block_size_factor) == (8, (16,), 4)
    assert FakeSpec(make_config(16, 32)).gpu_block_size == (16, 32)


def test_a_registered_spec_is_found_by_name() -> None:
    FactoryOfFakes.register_spec("Registered", __name__, "FakeSpec")
    assert type(FactoryOfFakes.create_spec(make_config(spec_name="Registered"))).__name__ == "FakeSpec"


def test_a_second_registration_is_refused() -> None:
    with pytest.raises(DuplicateNameError):
        FactoryOfFakes.register_spec(DEFAULT_SPEC, __name__, "FakeSpec")


def test_the_settings_imply_the_spec() -> None:
    plain = FactoryOfFakes.create_spec(make_config())
    tiered = FactoryOfFakes.create_spec(make_config(secondary_tiers=[{"type": "fs"}]))
    assert (type(plain).__name__, type(tiered).__name__) == ("FakeSpec", "ImpliedTieringSpec")


def test_a_spec_is_imported_from_its_module() -> None:
    config = make_config(spec_name="FakeSpec", spec_module_path=__name__, anything="goes")
    assert type(FactoryOfFakes.create_spec(config)).__name__ == "FakeSpec"


@pytest.mark.parametrize("module", ["no.such.module", __name__])
def test_a_module_without_the_spec_is_a_setting_to_correct(module: str) -> None:
    with pytest.raises(ConfigError, match="must define it") as caught:
        FactoryOfFakes.create_spec(make_config(spec_name="Missing", spec_module_path=module))
    assert caught.value.setting == "spec_name"


def test_an_unknown_spec_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{DEFAULT_SPEC}'"):
        OffloadingSpecFactory.create_spec(make_config(spec_name="CPUOfloadingSpec"))
