"""The survey tries each model in a process of its own, and a row says what came of it."""

import os
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.engines.transformers import trial
from tests.engines.transformers.tiny_models import build_tiny_model, list_model_types
from tests.engines.transformers.trial import ORIGINS, Outcome, Trial, try_model

from kvtier.errors import ModelError, UnknownNameError
from scripts import model_survey
from scripts.model_survey import main, make_page, run_one, try_all


def test_a_page_has_a_row_for_each_model_whatever_came_of_it() -> None:
    served = Trial(
        "good", Outcome.SERVED, "", dict.fromkeys(ORIGINS, 64), dict.fromkeys(ORIGINS, True), 768, 1024
    )
    differs = Trial(
        "bad", Outcome.DIFFERS, "another | answer", {"computed": 75, "fs": 0}, {"computed": True, "fs": True}
    )
    refused = Trial("ugly", Outcome.REFUSED, "why " * 100)
    plain = replace(served, model_type="plain", state_bytes=0)
    page = make_page([served, plain, differs, refused])
    assert "| served | 2 |\n| differs | 1 |\n| refused | 1 |" in page
    assert "| keys and values | `plain` |\n| recurrent states | `good` |\n" in page
    assert "| bad | differs | computed | another / answer |" in page
    assert "| ugly | refused |  | why why" in page
    assert max(map(len, page.splitlines()[10:])) < 260


def test_a_served_model_with_an_answer_that_was_not_tried_from_everywhere_keeps_a_row() -> None:
    found = dict.fromkeys(ORIGINS, 64) | {"fs": 0}
    part = Trial("part", Outcome.SERVED, "", found, dict.fromkeys(ORIGINS, True), 768)
    assert "| part | served | computed, device, host |  |" in make_page([part])


def test_most_architectures_of_transformers_are_in_the_table() -> None:
    assert len(list_model_types()) >= 150
    assert {"llama", "qwen3_next", "mamba2", "falcon_h1", "bamba", "jamba", "deepseek_v3"} <= set(
        list_model_types()
    )


def test_an_unknown_architecture_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'llama'"):
        build_tiny_model("lama")
    with pytest.raises(UnknownNameError, match="did you mean 'llama'"):
        main(["lama"])


@pytest.mark.parametrize(
    ("model_type", "outcome"),
    [("llama", Outcome.SERVED), ("mamba2", Outcome.SERVED), ("deepseek_v32", Outcome.REFUSED)],
)
def test_a_trial_compares_every_origin_with_plain_generate(
    tmp_path: Path, model_type: str, outcome: Outcome
) -> None:
    row = try_model(build_tiny_model(model_type), tmp_path, 8, 16)
    assert row.outcome is outcome
    if outcome is Outcome.SERVED:
        assert set(row.found) == set(row.equal) == set(ORIGINS)
        assert all(row.equal.values())
        assert row.found["fs"] >= 64
    else:
        assert "DynamicIndexedLayer" in row.reason


def test_a_wrong_answer_is_a_row_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "generate_plainly", lambda *_: [0] * 12)
    row = try_model(build_tiny_model("llama"), tmp_path, 8)
    assert row.outcome is Outcome.DIFFERS
    assert "another answer from fs" in row.reason


def crash(_model_type: str, _answer: Connection) -> None:
    os._exit(9)


def hang(_model_type: str, _answer: Connection) -> None:
    signal.pause()


def fail_to_build(_model_type: str, _folder: Path) -> Trial:
    raise ModelError("no such thing")


@pytest.mark.slow
def test_a_crash_costs_its_own_row_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    (good,) = try_all(["llama"], 1, max_trial_s=60.0)
    assert good.outcome is Outcome.SERVED
    monkeypatch.setattr(model_survey, "run_one", crash)
    (bad,) = try_all(["llama"], 1, max_trial_s=60.0)
    assert (bad.outcome, bad.reason) == (Outcome.FAILED, "its process ended with 9: a crash, or no memory")


@pytest.mark.slow
def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_survey, "run_one", hang)
    (row,) = try_all(["llama"], 1, max_trial_s=0.0)
    assert (row.outcome, row.reason) == (Outcome.FAILED, "had not ended after 0 s")


def test_an_exception_of_a_model_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        sent: Trial

        def send(self, row: Trial) -> None:
            self.sent = row

    pipe = Pipe()
    monkeypatch.setattr(model_survey, "try_architecture", fail_to_build)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    run_one("odd", pipe)  # type: ignore[arg-type]  # stands in for a pipe
    assert (pipe.sent.outcome, pipe.sent.reason) == (Outcome.FAILED, "ModelError: no such thing")
