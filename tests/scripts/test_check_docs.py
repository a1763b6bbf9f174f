"""The check of the pages finds dead links, lost pages and broken code, and nothing in good pages."""

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
