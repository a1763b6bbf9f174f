"""Names of offloading specs, and the construction of the one that a configuration asks for."""

import importlib

from kvtier.base import OffloadingSpec
from kvtier.config import OffloadingConfig, Settings
from kvtier.conflicts import DEFAULT_SPEC, TIERING_SPEC, refuse_conflicts
from kvtier.errors import ConfigError, KVTierError
from kvtier.registry import Registry


class OffloadingSpecFactory:
    """Finds a spec class by name; built-in names are imported when first asked for."""

    _registry: Registry[type[OffloadingSpec]] = Registry(
        "offloading spec",
        {
            DEFAULT_SPEC: "kvtier.cpu.spec:CPUOffloadingSpec",
            TIERING_SPEC: "kvtier.tiering.spec:TieringOffloadingSpec",
        },
    )

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Add a spec under ``name``.

        Raises:
            DuplicateNameError: the name is taken.
        """
        cls._registry.register(name, f"{module_path}:{class_name}")

    @classmethod
    def create_spec(cls, config: OffloadingConfig) -> OffloadingSpec:
        """Build the spec that ``config`` names, or the one its settings imply.

        Without ``spec_name``, a configuration with secondary tiers gets the tiering spec: a list of tiers
        that silently did nothing would be a trap.

        Raises:
            UnknownNameError: ``spec_name`` is neither registered nor to be found in ``spec_module_path``.
            ConfigError: the module given by ``spec_module_path`` does not define the spec, or settings contradict each
                other.
        """
        return cls._find_spec(config.settings)(config)

    @classmethod
    def check_spec(cls, settings: Settings) -> None:
        """Refuse what ``create_spec`` would refuse, without an engine; kvtier's own specs are not imported.

        Raises:
            UnknownNameError: as ``create_spec``.
            ConfigError: likewise.
        """
        if settings.spec_module_path is None and cls._name_of(settings) in cls._registry:
            refuse_conflicts(settings)  # the class is kvtier's or registered, and importing it may need torch
        else:
            cls._find_spec(settings)

    @classmethod
    def _find_spec(cls, settings: Settings) -> type[OffloadingSpec]:
        refuse_conflicts(settings)
        name, path = cls._name_of(settings), settings.spec_module_path
        if path is None:
            return cls._registry.resolve(name)
        if name in cls._registry:
            remedy = f"has no effect with spec_name={name!r}, which is registered: leave one of the two out"
            raise ConfigError("spec_module_path", path, remedy)
        return _import_spec(path, name)

    @staticmethod
    def _name_of(settings: Settings) -> str:
        return settings.spec_name or (TIERING_SPEC if settings.secondary_tiers else DEFAULT_SPEC)


def _import_spec(module_path: str, name: str) -> type[OffloadingSpec]:
    try:
        found: type[OffloadingSpec] = getattr(importlib.import_module(module_path), name)
    except KVTierError:
        raise  # the message of a missing extra names what to install
    except Exception as error:  # foreign module: its import may raise anything
        remedy = f"module {module_path!r} must define it: {error}"
        raise ConfigError("spec_name", name, remedy) from error
    return found
