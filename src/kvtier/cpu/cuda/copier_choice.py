"""Chooses, when an engine starts, how bytes are moved in each direction: by proof, then by measurement.

It copies nothing itself. A candidate that moves a wrong byte on scratch memory, or raises, is passed over; the
others take turns on a transfer of the real shape. Which is fastest depends on the link, the driver and the size of
a page, so no table says it in advance.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvtier.config import CudaCopier
from kvtier.cpu.cuda.candidates import Candidate
from kvtier.cpu.cuda.span_copier import DeviceCopier
from kvtier.cpu.cuda.trial import NUM_ROUNDS, Trial
from kvtier.errors import ConfigError, DeviceCopyError

logger = logging.getLogger(__name__)

UNPROVEN = CudaCopier.RUNS
"""What is taken where there is no memory for a trial: torch's own copies, and no buffer on the device."""

MIN_SHARE = 0.95
"""A candidate further ahead in the list is taken when it reaches this share of the fastest: measurements scatter by a
few per cent, and those ahead leave more of the device to the model."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How bytes are moved, by direction."""

    store: Candidate
    load: Candidate


def choose(candidates: Sequence[Candidate], wanted: CudaCopier, trial: Trial | None) -> Choice:
    """Choose among ``candidates``.

    Args:
        candidates: every way, in order of preference.
        wanted: the setting.
        trial: scratch memory; None where there was no room for any.

    Raises:
        ConfigError: the way that was asked for cannot be used, or moves wrong bytes.
        DeviceCopyError: no way moves the right bytes.
    """
    usable = take_usable(candidates, wanted)
    if trial is None:
        unproven = UNPROVEN if wanted is CudaCopier.AUTO else wanted
        (taken,) = (candidate for candidate in usable if candidate.name is unproven)
        logger.warning("there is no memory for a trial: copies are made with %r, unproven", taken.name.value)
        return Choice(taken, taken)
    store = _choose_direction(usable, wanted, trial, is_store=True)
    load = _choose_direction(usable, wanted, trial, is_store=False)
    return Choice(store, load)


def take_usable(candidates: Sequence[Candidate], wanted: CudaCopier) -> list[Candidate]:
    """Return those that the setting allows and this machine has. Pure but for the log.

    Raises:
        ConfigError: the one that was asked for is not among them.
    """
    for candidate in candidates:
        if candidate.name is wanted and candidate.objection is not None:
            raise ConfigError("cuda_copier", wanted.value, f'{candidate.objection}; or set it to "auto"')
        if candidate.objection is not None:
            logger.info("copies with %r are passed over: %s", candidate.name.value, candidate.objection)
    return [
        candidate
        for candidate in candidates
        if candidate.objection is None and wanted in (candidate.name, CudaCopier.AUTO)
    ]


def pick(rates: Mapping[CudaCopier, float]) -> CudaCopier:
    """Return the first, in the order of the mapping, that is about as fast as the fastest. Pure."""
    enough = MIN_SHARE * max(rates.values())
    return next(name for name, rate in rates.items() if rate >= enough)


def _choose_direction(
    usable: Sequence[Candidate], wanted: CudaCopier, trial: Trial, *, is_store: bool
) -> Candidate:
    direction = "stores" if is_store else "loads"
    proven: dict[CudaCopier, DeviceCopier] = {}
    try:
        for candidate in usable:
            fault = _prove(candidate, trial, proven, is_store=is_store)
            if fault is None:
                continue
            logger.warning("%s with %r are passed over: %s", direction, candidate.name.value, fault)
            if wanted is not CudaCopier.AUTO:
                raise ConfigError("cuda_copier", wanted.value, f'{direction} fail: {fault}; set it to "auto"')
        if not proven:
            raise DeviceCopyError(
                "the trial", f"no way of {direction} moves the right bytes", len(usable), None
            )
        rates = _measure(proven, trial, is_store=is_store)
        if not rates:
            raise DeviceCopyError("the trial", f"every way of {direction} failed", len(proven), None)
    finally:
        for copier in proven.values():
            copier.release()
    (taken,) = (candidate for candidate in usable if candidate.name is pick(rates))
    logger.info(
        "%s are made with %r; measured %s",
        direction,
        taken.name.value,
        ", ".join(f"{name.value} {rate:.1f} GB/s" for name, rate in rates.items()),
    )
    return taken


def _prove(
    candidate: Candidate, trial: Trial, proven: dict[CudaCopier, DeviceCopier], *, is_store: bool
) -> str | None:
    """Put a copier into ``proven``, or say what is wrong with it."""
    try:
        fault = trial.find_fault(candidate.build, is_store=is_store)
        if fault is None:
            proven[candidate.name] = trial.build(candidate.build)
    except Exception as error:  # noqa: BLE001  # thread top: runtimes and compilers raise what they like; another way is taken
        return f"{type(error).__name__}: {error}"
    return fault


def _measure(
    proven: Mapping[CudaCopier, DeviceCopier], trial: Trial, *, is_store: bool
) -> dict[CudaCopier, float]:
    """Return the median rate of each that does not fail.

    They take turns, so that a passing disturbance hits each alike. A transfer is larger than a proof's: one that
    found room there may find none here.
    """
    rates: dict[CudaCopier, list[float]] = {name: [] for name in proven}
    for _ in range(1 + NUM_ROUNDS):
        for name in list(rates):
            try:
                rates[name].append(trial.measure(proven[name], is_store=is_store))
            except Exception as error:  # noqa: BLE001  # thread top: as in a proof
                logger.warning("%r is passed over: %s: %s", name.value, type(error).__name__, error)
                del rates[name]
    return {name: median(measured[1:]) for name, measured in rates.items()}
