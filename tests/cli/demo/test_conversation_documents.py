"""Documents are found beside a checkout and in a wheel, and a directory without text is one clear error."""

from pathlib import Path

import pytest

from kvtier.cli.demo.conversation import find_own_documents, read_documents
from kvtier.errors import ConfigError


def write(path: Path, text: str) -> Path:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_documents_of_a_directory_come_by_name_and_empty_or_foreign_files_are_left_out(
    tmp_path: Path,
) -> None:
    write(tmp_path / "b.md", "second")
    write(tmp_path / "a" / "x.txt", "first")
    write(tmp_path / "c.md", "")
    write(tmp_path / "d.png", "no text")

    documents = read_documents(tmp_path)

    assert [(document.name, document.text) for document in documents] == [
        ("a/x.txt", b"first"),
        ("b.md", b"second"),
    ]


def test_a_checkout_gives_its_pages(tmp_path: Path) -> None:
    package = write(tmp_path / "src" / "kvtier" / "base.py", "'''code'''").parent
    write(tmp_path / "docs" / "page.md", "a page")

    assert [document.name for document in find_own_documents(package)] == ["page.md"]


def test_a_wheel_gives_its_sources_even_with_somebody_elses_docs_around(tmp_path: Path) -> None:
    package = write(tmp_path / "lib" / "site-packages" / "kvtier" / "base.py", "'''code'''").parent
    write(tmp_path / "lib" / "docs" / "page.md", "a stranger's page")

    assert [document.name for document in find_own_documents(package)] == ["base.py"]


def test_the_installed_package_has_documents_of_its_own() -> None:
    assert sum(len(document.text) for document in read_documents(None)) > 5_000


def test_a_missing_directory_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--docs.*existing directory"):
        read_documents(tmp_path / "nowhere")


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--docs.*no text.*\.md"):
        read_documents(tmp_path)


def test_a_link_that_leads_nowhere_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "loop.md").symlink_to("loop.md")
    write(tmp_path / "good.md", "text")

    assert [document.name for document in read_documents(tmp_path)] == ["good.md"]
