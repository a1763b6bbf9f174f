"""The check of the pages finds dead links, lost pages, broken code and heavy prose, and nothing in good pages."""

from pathlib import Path

import pytest

from scripts import check_docs


def write(root: Path, **texts: str) -> None:
    """Write README and pages of docs; ``__`` in a name stands for a folder."""
    for name, text in texts.items():
        path = root / f"{name.replace('__', '/')}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_good_pages_have_no_problem(tmp_path: Path) -> None:
    write(
        tmp_path,
        README="# Top\n[a](docs/a.md), [b](docs/a.md#the-second-one), [c](#top), [d](https://example.org/x)\n",
        docs__a="# A\n\n## The second one\n\n```python\nx = 1\n```\n",
    )

    assert check_docs.problems(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/lost.md)", "does not exist"),
        ("![a](picture.png)", "does not exist"),
        ("[a](#nowhere)", "no such heading"),
        ("```python\nx = = 1\n```\n", "does not compile"),
    ],
)
def test_a_problem_is_found(tmp_path: Path, text: str, expected: str) -> None:
    write(tmp_path, README=f"# Top\n\n{text}\n")

    (message,) = check_docs.problems(tmp_path)

    assert expected in message


def test_a_page_that_nothing_links_to_is_found(tmp_path: Path) -> None:
    write(tmp_path, README="# Top\n[a](docs/a.md)\n", docs__a="[b](b.md)\n", docs__b="", docs__lost="")

    (message,) = check_docs.problems(tmp_path)

    assert message == f"{tmp_path}/docs/lost.md: no link leads here from README.md"


def test_links_and_headings_in_code_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, README="# Top\n```text\n[a](lost.md)\n# Fake\n```\nand `[b](lost.md)`\n")

    assert check_docs.problems(tmp_path) == []
    assert check_docs.anchors(tmp_path / "README.md") == {"top"}


def test_a_block_knows_its_line_and_whether_it_is_run(tmp_path: Path) -> None:
    write(tmp_path, README="# Top\n\n```python\na\n```\n\n```python no-run\nb\n```\n\n```json\n{}\n```\n")

    blocks = check_docs.python_blocks(tmp_path / "README.md")

    assert [(block.line, block.code, block.is_run) for block in blocks] == [
        (3, "a\n", True),
        (7, "b\n", False),
    ]


def test_a_long_paragraph_is_found_and_an_item_of_a_list_is_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        README="# Top\n\n" + "word " * 81 + "\n\n" + "- " + "word " * 80 + "\n- " + "word " * 80 + "\n",
    )

    assert check_docs.problems(tmp_path) == [f"{tmp_path}/README.md:3: paragraph of 81 words, at most 80"]


def test_a_sentence_with_three_numbers_is_found(tmp_path: Path) -> None:
    write(tmp_path, README="# Top\n\nIt takes 1 or 2 ms.\nThen 3, 4 and 5.\n")

    (message,) = check_docs.problems(tmp_path)

    assert message.startswith(f"{tmp_path}/README.md:3: 3 numbers in one sentence")


@pytest.mark.parametrize(
    "text",
    [
        "| 1 | 2 | 3 |\n|---|---|---|\n| 4 | 5 | 6 |",
        "```text\n1 2 3 4\n```",
        "`1 2 3 4` and S3, AES-256 and v1.2.3",
        "[0001](a.md), [0002](a.md), [0003](a.md)",
        "vLLM 0.32.0 on Python 3.11 with torch 2.13",
        "<!-- 1 2 3 4 -->",
        "1. first\n2. second\n3. third",
    ],
)
def test_code_tables_names_and_versions_are_no_numbers_of_prose(tmp_path: Path, text: str) -> None:
    write(tmp_path, README=f"# Top\n\n{text}\n", a="[t](README.md)")

    assert list(check_docs.prose_problems(tmp_path / "README.md")) == []


def test_decisions_and_the_changelog_may_argue_with_numbers(tmp_path: Path) -> None:
    write(
        tmp_path,
        README="[c](CHANGELOG.md) [d](docs/adr/0001.md)\n",
        CHANGELOG="1 2 3\n",
        docs__adr__0001="1 2 3\n",
    )

    assert check_docs.problems(tmp_path) == []


def test_a_decision_of_too_many_words_is_found_and_marks_of_tables_are_no_words(tmp_path: Path) -> None:
    write(
        tmp_path,
        README="[s](docs/adr/0001.md) [l](docs/adr/0002.md) [i](docs/adr/README.md)\n",
        docs__adr__0001="word " * 350 + "\n\n| --- | - |\n",
        docs__adr__0002="word " * 351,
        docs__adr__README="word " * 351,
    )

    assert check_docs.problems(tmp_path) == [
        f"{tmp_path}/docs/adr/0002.md: decision of 351 words, at most 350"
    ]
