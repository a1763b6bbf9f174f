"""Settings that name one thing twice, and settings that others leave without an effect: both are refused at the start.

A user who writes a setting expects something of it. An engine that starts and does not do it says so only when blocks
are missing. So every pair of which one makes the other idle stands in a table here, and each message names both. A
setting at its default asks for nothing and is never refused. A spec of the user's own may use settings otherwise: its
engine is checked for nothing that depends on the spec.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvtier.config import TRACE_VARIABLE, Settings
from kvtier.errors import ConfigError

DEFAULT_SPEC = "CPUOffloadingSpec"
TIERING_SPEC = "TieringOffloadingSpec"
"""The offloading specs of kvtier; without ``spec_name`` an engine with secondary tiers gets the second."""

PLACE_SETTINGS = ("root_dir", "path", "url", "prefix", "master")
"""Settings of tiers that say together where a tier keeps its blocks."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A setting that another one can leave without an effect.

    Attributes:
        setting: the one without an effect.
        cause: the other.
        holds: whether it has none.
        remedy: what to write.
        depends_on_spec: whether a spec of the user's own may use it all the same.
    """

    setting: str
    cause: str
    holds: Callable[[Settings], bool]
    remedy: str
    depends_on_spec: bool = False


def _has_no_tier(settings: Settings) -> bool:
    return not settings.secondary_tiers


def _encrypts_nothing(settings: Settings) -> bool:
    return all(entry.get("encryption", True) is False for entry in settings.secondary_tiers)


def _records_nothing(settings: Settings) -> bool:
    return not (settings.record_trace or os.environ.get(TRACE_VARIABLE))


IDLE = (
    Idle(
        "secondary_tiers",
        "spec_name",
        lambda settings: settings.spec_name == DEFAULT_SPEC,
        f"that spec keeps blocks in host memory alone: leave spec_name out, or write {TIERING_SPEC!r}",
    ),
    Idle(
        "spec_module_path",
        "spec_name",
        lambda settings: settings.spec_name in (None, DEFAULT_SPEC, TIERING_SPEC),
        "it is looked for only in spec_module_path if it is no spec of kvtier's: write the name of your class",
    ),
    Idle(
        "max_tracker_size",
        "store_threshold",
        lambda settings: settings.store_threshold < 2,
        "nothing is counted below 2: leave max_tracker_size out, or write a store_threshold of 2 or more",
        depends_on_spec=True,
    ),
    Idle(
        "load_if",
        "secondary_tiers",
        _has_no_tier,
        "hits in host memory are always loaded: leave load_if out, or name a tier",
        depends_on_spec=True,
    ),
    Idle(
        "encryption",
        "secondary_tiers",
        _encrypts_nothing,
        "only tiers encrypt, and none of them is to; host memory is not encrypted: leave encryption out, or name a "
        'tier without "encryption": false',
        depends_on_spec=True,
    ),
    Idle(
        "audit_limit",
        "audit_ratio",
        lambda settings: settings.audit_ratio == 0,
        "nothing is audited: leave audit_limit out, or write a ratio above 0",
    ),
    Idle(
        "audit_seed",
        "audit_ratio",
        lambda settings: settings.audit_ratio == 0,
        "nothing is audited: leave audit_seed out, or write a ratio above 0",
    ),
    Idle(
        "metrics_host",
        "metrics_port",
        lambda settings: settings.metrics_port is None,
        "no page is served: leave metrics_host out, or write a port",
    ),
    Idle(
        "record_max_bytes",
        "record_trace",
        _records_nothing,
        f"nothing is recorded: leave record_max_bytes out, or name a file in record_trace or {TRACE_VARIABLE}",
    ),
    Idle(
        "record_salt_file",
        "record_trace",
        _records_nothing,
        f"nothing is recorded: leave record_salt_file out, or name a file in record_trace or {TRACE_VARIABLE}",
    ),
)


def refuse_conflicts(settings: Settings) -> None:
    """Refuse settings of which one leaves another without an effect, and tiers that name one place.

    Raises:
        ConfigError: there are such; the message names both and what to write.
    """
    is_own_spec = settings.spec_name not in (None, DEFAULT_SPEC, TIERING_SPEC)
    asked = {one.name for one in fields(Settings) if getattr(settings, one.name) != one.default}
    for idle in IDLE:
        if idle.setting in asked and idle.holds(settings) and not (is_own_spec and idle.depends_on_spec):
            cause = _show(settings, idle.cause)
            remedy = f"has no effect with {idle.cause}={cause}: {idle.remedy}"
            raise ConfigError(idle.setting, _value(settings, idle.setting), remedy)
    _refuse_idle_fill(settings.secondary_tiers)
    _refuse_plain_blocks(settings)
    _refuse_one_place(settings.secondary_tiers)


def _refuse_idle_fill(tiers: Sequence[Mapping[str, Any]]) -> None:  # Any: each tier checks its own
    if tiers and tiers[-1].get("fill") is True:
        remedy = (
            f"has no effect for the last of secondary_tiers ({_type_of(tiers[-1])}): it copies from later ones; "
            "leave it out, or name this tier earlier"
        )
        raise ConfigError("fill", value=True, remedy=remedy)


def _refuse_plain_blocks(settings: Settings) -> None:
    for entry in settings.secondary_tiers:
        if entry.get("encryption") is True and settings.encryption is None:
            remedy = (
                f"of tier {_type_of(entry)!r} encrypts nothing while the engine's own encryption is not set: write "
                '"encryption": {"key_file": "/path"} beside secondary_tiers'
            )
            raise ConfigError("encryption", value=True, remedy=remedy)


def _refuse_one_place(tiers: Sequence[Mapping[str, Any]]) -> None:  # Any: as above
    positions: dict[tuple[object, ...], int] = {}
    for position, entry in enumerate(tiers):
        place = tuple(_normal(entry.get(name)) for name in PLACE_SETTINGS)
        if not any(place):
            continue
        first = positions.setdefault((entry.get("type"), *place), position)
        if first != position:
            remedy = (
                f"names one place twice, in tiers {first} and {position} ({_type_of(entry)}): the second never has a "
                "block that the first lacks; leave it out, or give it a place of its own"
            )
            raise ConfigError("secondary_tiers", [_type_of(one) for one in tiers], remedy)


def _normal(value: object) -> str:
    text = str(value or "")
    return os.path.normpath(text) if text.startswith("/") else text.rstrip("/")


def _type_of(entry: Mapping[str, Any]) -> str:  # Any: as above
    return str(entry.get("type", "?"))


def _value(settings: Settings, name: str) -> object:
    """Return what a message may show of a setting: of tiers their types, as a URL may carry a password."""
    if name == "secondary_tiers":
        return [_type_of(entry) for entry in settings.secondary_tiers]
    value = getattr(settings, name)
    return getattr(value, "value", value)


def _show(settings: Settings, name: str) -> str:
    value = _value(settings, name)
    return "None" if value is None else repr(value)
