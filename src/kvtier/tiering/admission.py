"""Which blocks are worth writing to a tier: the setting ``admission``, and its effect on the primary's own admission.

A forecast estimates how likely a block is used again; the setting says how likely that has to be, within what time.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from math import isfinite

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.cpu.policies.base import Admit
from kvtier.errors import ConfigError, UnknownNameError

EXAMPLE = '{"min_reuse_probability": 0.3, "horizon_s": 1024}'


@dataclass(frozen=True, slots=True)
class TierAdmission:
    """How likely a block must be used again to be written to a tier.

    Attributes:
        min_reuse_probability: the least probability of reuse, from 0 to 1.
        horizon_s: within how many seconds, above zero.

    Raises:
        ConfigError: a value out of its range.
    """

    min_reuse_probability: float
    horizon_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.min_reuse_probability <= 1:
            remedy = "must be a probability, from 0 to 1"
            raise ConfigError("admission.min_reuse_probability", self.min_reuse_probability, remedy)
        if not (self.horizon_s > 0 and isfinite(self.horizon_s)):
            raise ConfigError("admission.horizon_s", self.horizon_s, "must be a number of seconds above zero")


def parse_admission(value: object) -> TierAdmission | None:
    """Read the setting ``admission`` of a tier; None, which is the default, writes every block. Pure.

    Raises:
        UnknownNameError: it has a name that it does not know.
        ConfigError: it is no mapping, lacks a name, or a value is of the wrong type or out of its range.
    """
    if value is None:
        return None
    names = {field.name for field in fields(TierAdmission)}
    if not isinstance(value, Mapping):
        raise ConfigError("admission", value, f"must be a mapping such as {EXAMPLE}")
    for name in value:
        if name not in names:
            raise UnknownNameError("name in 'admission'", str(name), names)
    for name in sorted(names):
        number = value.get(name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"admission.{name}", number, f"must be a number, as in {EXAMPLE}")
    return TierAdmission(float(value["min_reuse_probability"]), float(value["horizon_s"]))


def make_passing_admission(
    admit: Admit, wanted_below: Callable[[Collection[OffloadKey]], Collection[OffloadKey]]
) -> Admit:
    """Return what admits blocks that the policy of host memory refuses and a tier wants: they reach it only so.

    They are the first to leave, since the policy does not want them.

    Args:
        admit: the policy's own.
        wanted_below: returns those of the keys that a tier wants.
    """

    def admit_passing(keys: Collection[OffloadKey], req_id: str) -> Collection[OffloadKey]:
        admitted = frozenset(admit(keys, req_id))
        refused = [key for key in keys if key not in admitted]
        if not refused:
            return keys
        wanted = frozenset(wanted_below(refused))
        ended: set[int] = set()
        passing: set[OffloadKey] = set()
        for key in refused:
            group = get_offload_group_idx(key)
            if key not in wanted:
                ended.add(group)
            elif group not in ended:
                passing.add(key)
        return [key for key in keys if key in admitted or key in passing]

    return admit_passing
