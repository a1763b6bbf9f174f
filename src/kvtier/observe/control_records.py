"""Records of requests as JSON: what ``kvtier recent`` and ``kvtier why`` get of a living engine."""

from collections.abc import Mapping
from typing import Any

from kvtier.base import OffloadKey
from kvtier.errors import ControlError, shorten
from kvtier.misses import Miss, MissCause, MissedRun, RequestRecord


def encode_record(record: RequestRecord) -> dict[str, Any]:  # Any: JSON
    """Return a record as JSON. Pure."""
    return {
        "req_id": record.req_id,
        "began_s": record.began_s,
        "num_prompt_tokens": record.num_prompt_tokens,
        "tokens_by_origin": dict(record.tokens_by_origin),
        "missed": [
            {
                "first_token": run.first_token,
                "num_tokens": run.num_tokens,
                "cause": run.miss.cause.value,
                "tier": run.miss.tier,
                "detail": dict(run.miss.detail),
            }
            for run in record.missed
        ],
        "waited_s": record.waited_s,
        "first_key": None if record.first_key is None else record.first_key.hex(),
    }


def decode_record(values: Mapping[str, Any]) -> RequestRecord:  # Any: JSON, checked here
    """Return the record that ``encode_record`` made. Pure.

    Raises:
        ControlError: it is no such record, for example one of a later version.
    """
    try:
        first_key = values["first_key"]
        return RequestRecord(
            str(values["req_id"]),
            float(values["began_s"]),
            int(values["num_prompt_tokens"]),
            {str(origin): int(number) for origin, number in values["tokens_by_origin"].items()},
            tuple(_decode_run(run) for run in values["missed"]),
            float(values["waited_s"]),
            None if first_key is None else OffloadKey(bytes.fromhex(first_key)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ControlError(f"the engine sent no record that this version reads: {shorten(values)}") from error


def _decode_run(values: Mapping[str, Any]) -> MissedRun:  # Any: JSON
    miss = Miss(MissCause(values["cause"]), str(values["tier"]), dict(values["detail"]))
    return MissedRun(int(values["first_token"]), int(values["num_tokens"]), miss)
