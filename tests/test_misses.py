"""Records of requests: their sums, and their form as JSON."""

import json

import pytest

from kvtier.base import OffloadKey
from kvtier.errors import InvariantError, RecordError
from kvtier.misses import Miss, MissCause, MissedRun, RequestRecord

RECORD = RequestRecord(
    req_id="cmpl-1",
    began_s=1_700_000_000.25,
    num_prompt_tokens=100,
    tokens_by_origin={"device": 16, "fs": 32},
    missed=(
        MissedRun(48, 48, Miss(MissCause.EVICTED, "host", {"ago_s": 12.5})),
        MissedRun(96, 4, Miss(MissCause.PARTIAL_BLOCK)),
    ),
    waited_s=0.125,
    first_key=OffloadKey(b"\x01\xab"),
)


def test_a_record_survives_json() -> None:
    text = json.dumps(RECORD.to_json())

    assert RequestRecord.from_json(json.loads(text)) == RECORD


def test_a_record_is_written_in_the_words_of_the_documents() -> None:
    assert RECORD.to_json() == {
        "req_id": "cmpl-1",
        "began_s": 1_700_000_000.25,
        "prompt_tokens": 100,
        "origins": {"device": 16, "fs": 32},
        "missed": [
            {"first_token": 48, "tokens": 48, "cause": "evicted", "tier": "host", "detail": {"ago_s": 12.5}},
            {"first_token": 96, "tokens": 4, "cause": "partial_block"},
        ],
        "waited_s": 0.125,
        "first_key": "01ab",
    }


def test_tokens_by_cause_and_tier_are_summed() -> None:
    assert RECORD.num_missed_tokens == 52
    assert RECORD.missed_by_cause() == {(MissCause.EVICTED, "host"): 48, (MissCause.PARTIAL_BLOCK, ""): 4}


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": 99},
        {"origins": {"device": 17, "fs": 32}},
        {"origins": {"device": 48, "fs": 0}},
        {"missed": []},
        {"missed": [{"first_token": 49, "tokens": 51, "cause": "evicted"}]},
        {"missed": [{"first_token": 48, "tokens": 52, "cause": "bad luck"}]},
        {"first_key": "not hex"},
        {"origins": None},
        {"req_id": ...},
    ],
)
def test_a_record_that_does_not_fit_is_refused_in_one_line(change: dict[str, object]) -> None:
    values = {**RECORD.to_json(), **change}
    if values["req_id"] is ...:
        del values["req_id"]
    with pytest.raises(RecordError, match="not a record of a request") as raised:
        RequestRecord.from_json(values)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("values", [None, [], 3, "text"])
def test_what_is_no_object_is_refused(values: object) -> None:
    with pytest.raises(RecordError):
        RequestRecord.from_json(values)


def test_a_record_whose_tokens_have_no_origin_fails_its_check() -> None:
    with pytest.raises(InvariantError, match="are not a prompt of 10"):
        RequestRecord("a", 0.0, 10, {"device": 9}).check()
