"""Why a prompt token was computed: the causes, and what is known of one request.

Every prompt token has one origin. It came from device memory, from host memory, from one secondary tier, or it was
computed, for exactly one cause. For each request these counts sum to the length of its prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from kvtier.base import OffloadKey

Detail = Mapping[str, str | float]
"""What stands beside a cause: which tier's namespace differs, how many seconds ago a block left."""

NO_DETAIL: Detail = MappingProxyType({})


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
        detail: what is known besides; every value is a number or a short text.
    """

    cause: MissCause
    tier: str = ""
    detail: Detail = NO_DETAIL


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
        tokens_by_origin: tokens that were not computed, by "device", "host" or the type of a secondary tier.
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
