"""Why a prompt token was computed: the causes, and what is known of one request.

Every prompt token has one origin. It came from device memory, from host memory, from one secondary tier, or it was
computed, for exactly one cause. For each request these counts sum to the length of its prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from kvtier.errors import InvariantError, RecordError
from kvtier.keys import OffloadKey

Detail = Mapping[str, str | float]
"""What stands beside a cause: which tier's namespace differs, how many seconds ago a block left."""

MISSED_TOKENS = "connector.missed_tokens."
"""Prefix of the counters of tokens that were computed: the cause follows, then the tier where there is one."""

NO_DETAIL: Detail = MappingProxyType({})

UNKNOWN_TENANT_REASON = "tenant unknown"
"""The detail "reason" of ``MissCause.LIMITED`` where a request's tenant is not served."""

NO_KEY_REASON = "no key"
"""The same where an encrypted tier has no key for the tenant of a block."""

MORE_FIELDS = "and"
"""The detail that says in how many fields more a namespace differs than are named."""

DEVICE_ORIGIN = "device"
"""The origin of tokens that device memory held."""

HOST_ORIGIN = "host"
"""The origin of tokens from host memory, and the tier of causes that are about it."""


class MissCause(Enum):
    """Why tokens of a prompt were computed; the values are labels of counters."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    NOT_STORED = "not_stored"
    OTHER_NAMESPACE = "other_namespace"
    EXPIRED = "expired"
    PURGED = "purged"
    IN_FLIGHT = "in_flight"
    LATE = "late"
    TIER_DOWN = "tier_down"
    DAMAGED = "damaged"
    LOAD_FAILED = "load_failed"
    GROUP_SHORT = "group_short"
    NO_ROOM = "no_room"
    LIMITED = "limited"
    SLOWER = "slower"
    AUDITED = "audited"
    PARTIAL_BLOCK = "partial_block"


SUSPICIONS = frozenset({MissCause.OTHER_NAMESPACE, MissCause.NEVER_SEEN})
"""Causes that a tier suspects: whatever any place remembers of the block goes before them."""


class NotStored(Enum):
    """Why a block that was computed here is not kept; the detail "reason" of ``MissCause.NOT_STORED``."""

    SKIP_STORE = "skip_store"
    MAX_STORE_TOKENS = "max_store_tokens"
    PROMPT_ONLY = "prompt_only"
    REUSE_FILTER = "reuse_filter"
    ADMISSION = "admission"
    NO_ROOM = "no_room"
    DECLINED = "declined"
    JOB_FAILED = "job_failed"


class Miss(NamedTuple):
    """Why a block is missing.

    Attributes:
        cause: why.
        tier: the type of the tier that it is about, "host" for the primary; empty when it is about none.
        detail: what is known besides; every value is a number or a short text. "ago_s" is how many seconds ago it
            happened, "reason" names a kind within the cause, "known_s" is for how many seconds nothing named it.
    """

    cause: MissCause
    tier: str = ""
    detail: Detail = NO_DETAIL


NEVER_SEEN = Miss(MissCause.NEVER_SEEN)
FORGOTTEN = Miss(MissCause.EVICTED)
"""Of a block that an earlier request had, and that left so long ago that when and from where is no longer known."""


def not_stored(reason: NotStored, tier: str = HOST_ORIGIN) -> Miss:
    """Return the miss of a block that was computed here and not kept. Pure."""
    return Miss(MissCause.NOT_STORED, tier, MappingProxyType({"reason": reason.value}))


class MissedRun(NamedTuple):
    """Tokens of one prompt that were computed for one cause.

    Attributes:
        first_token: position of the first of them in the prompt.
        num_tokens: how many, at least 1.
        miss: why.
    """

    first_token: int
    num_tokens: int
    miss: Miss


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Where the prompt of one request came from. INVARIANT: all its tokens sum to ``num_prompt_tokens``.

    Attributes:
        req_id: the request.
        began_s: when the engine began to compute it, seconds since 1970.
        num_prompt_tokens: length of the prompt.
        tokens_by_origin: tokens that were not computed, by "device", "host" or the type of a secondary tier; none of
            the counts is zero.
        missed: tokens that were computed, first positions first.
        waited_s: seconds from its first search to the final answer.
        first_key: key of the first block that is missing; None when none is.
    """

    req_id: str
    began_s: float
    num_prompt_tokens: int
    tokens_by_origin: Mapping[str, int] = field(default_factory=dict)
    missed: tuple[MissedRun, ...] = ()
    waited_s: float = 0.0
    first_key: OffloadKey | None = None

    @property
    def num_missed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return sum(run.num_tokens for run in self.missed)

    def missed_by_cause(self) -> dict[tuple[MissCause, str], int]:
        """Return the tokens that were computed by cause and tier."""
        tokens: dict[tuple[MissCause, str], int] = {}
        for _, num_tokens, miss in self.missed:
            tokens[miss.cause, miss.tier] = tokens.get((miss.cause, miss.tier), 0) + num_tokens
        return tokens

    def check(self) -> None:
        """Assert that each prompt token has one origin.

        Raises:
            InvariantError: the counts do not sum to the prompt, or runs overlap or are empty.
        """
        end = num_found = sum(self.tokens_by_origin.values())
        for first, num_tokens, miss in self.missed:
            if first != end or num_tokens < 1:
                raise InvariantError(
                    f"request {self.req_id}: {num_tokens} tokens at {first} ({miss.cause.value}) follow token {end}"
                )
            end += num_tokens
        if end != self.num_prompt_tokens or any(count < 1 for count in self.tokens_by_origin.values()):
            raise InvariantError(
                f"request {self.req_id}: {num_found} tokens of {dict(self.tokens_by_origin)} and {end - num_found} "
                f"computed ones are not a prompt of {self.num_prompt_tokens}"
            )

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the record as a JSON object, with its key in hex."""
        return {
            "req_id": self.req_id,
            "began_s": round(self.began_s, 6),
            "prompt_tokens": self.num_prompt_tokens,
            "origins": dict(self.tokens_by_origin),
            "missed": [run_to_json(run) for run in self.missed],
            "waited_s": round(self.waited_s, 6),
            "first_key": None if self.first_key is None else self.first_key.hex(),
        }

    @staticmethod
    def from_json(values: object) -> "RequestRecord":
        """Return the record that ``to_json`` has written.

        Raises:
            RecordError: it is no such object, or its tokens do not sum to its prompt.
        """
        try:
            record = _read_record(values)
            record.check()
        except (KeyError, TypeError, ValueError, AttributeError, InvariantError) as error:
            raise RecordError(values, f"{type(error).__name__}: {error}") from error
        return record


def run_to_json(run: MissedRun) -> dict[str, Any]:  # Any: JSON
    """Return a run of missed tokens as a JSON object; tier and detail are left out where there are none. Pure."""
    values: dict[str, Any] = {"first_token": run.first_token, "tokens": run.num_tokens}
    values["cause"] = run.miss.cause.value
    if run.miss.tier:
        values["tier"] = run.miss.tier
    if run.miss.detail:
        values["detail"] = dict(run.miss.detail)
    return values


def run_from_json(values: Mapping[str, Any]) -> MissedRun:  # Any: JSON
    """Return the run that ``run_to_json`` has written.

    Raises:
        KeyError, TypeError, ValueError: it is no such object.
    """
    detail = {str(name): _read_detail(value) for name, value in values.get("detail", {}).items()}
    miss = Miss(MissCause(values["cause"]), str(values.get("tier", "")), MappingProxyType(detail))
    return MissedRun(int(values["first_token"]), int(values["tokens"]), miss)


def _read_record(values: Any) -> RequestRecord:  # noqa: ANN401 - JSON; the caller catches what does not fit
    key = values.get("first_key")
    return RequestRecord(
        req_id=str(values["req_id"]),
        began_s=float(values["began_s"]),
        num_prompt_tokens=int(values["prompt_tokens"]),
        tokens_by_origin={str(name): int(count) for name, count in values["origins"].items()},
        missed=tuple(map(run_from_json, values["missed"])),
        waited_s=float(values.get("waited_s", 0.0)),
        first_key=None if key is None else OffloadKey(bytes.fromhex(key)),
    )


def _read_detail(value: object) -> str | float:
    return value if isinstance(value, int | float) else str(value)
