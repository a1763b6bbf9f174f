"""Each of the ten questions is answered by its command, on a real engine, and the page has the same commands."""

import os
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs an engine: pip install 'kvtier[transformers]'")
pytest.importorskip("xxhash", reason="needs the fs tier: pip install 'kvtier[fs]'")

from kvtier.namespace import tag_tenant
from scripts.ten_questions import PAGE, QUESTIONS, TENANT_SALT, answer, serving, shorten

TAG = tag_tenant(TENANT_SALT)


@pytest.mark.slow
def test_each_command_answers_its_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    instance_id = f"chat-of-{tmp_path.name}-{os.getpid()}"
    with serving(tmp_path, instance_id) as engine:
        for question in QUESTIONS:
            status, shown = answer(question, tmp_path, engine, instance_id)
            assert status == question.status, shown
            missing = [text for text in question.shows if text.replace("TENANT", TAG) not in shown]
            assert not missing, f"{question.command} does not show {missing}: {shown}"


def test_the_page_has_each_question_with_its_command_and_what_it_shows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    parts = page.split("\n## ")[1:]
    assert len(parts) == len(QUESTIONS) == 10
    for number, (question, part) in enumerate(zip(QUESTIONS, parts, strict=True), 1):
        command = question.command.replace("FOLDER", "/var/cache/kvtier").replace("TENANT", TAG)
        assert part.startswith(f"{number}. {question.text}\n")
        assert f"\n$ {command}\n" in part
        assert question.reading in part
        for text in question.shows:
            assert text.replace("TENANT", TAG) in part


def test_a_long_answer_is_cut() -> None:
    assert shorten("\n".join(map(str, range(100))))[-2:] == ["35", "..."]
    assert shorten("\n\na\n\n") == ["a"]
