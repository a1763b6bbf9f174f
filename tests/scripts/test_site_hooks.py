"""Links that leave ``docs`` become links to pages of the site, and code is left as it is."""

from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'kvtier[docs]'")

from scripts import site_hooks

ROOT = Path("/project")


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("guide/a.md", "b.md", "b.md"),
        ("guide/a.md", "../concepts/b.md#part", "../concepts/b.md#part"),
        ("guide/a.md", "../../CONTRIBUTING.md#laws", "../project/CONTRIBUTING.md#laws"),
        ("guide/a.md", "../../examples/a.py", "../source/examples/a.py.md"),
        ("index.md", "../README.md", "index.md"),
        ("guide/a.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("guide/a.md", "#part", "#part"),
    ],
)
def test_a_link_leads_to_a_page_of_the_site(uri: str, link: str, expected: str) -> None:
    base = (ROOT / "docs" / uri).parent

    assert site_hooks.rewrite(f"See [it]({link}).", uri, base, ROOT) == f"See [it]({expected})."


def test_a_page_from_outside_links_into_the_site() -> None:
    text = "[a](docs/guide/a.md) [b](LICENSE) ![p](docs/pictures/p.svg)"

    rewritten = site_hooks.rewrite(text, "project/CONTRIBUTING.md", ROOT, ROOT)

    assert rewritten == "[a](../guide/a.md) [b](../source/LICENSE.md) ![p](../pictures/p.svg)"


def test_code_blocks_keep_what_looks_like_a_link() -> None:
    text = "```text\n[a](../../x.py)\n```\n"

    assert site_hooks.rewrite(text, "guide/a.md", ROOT / "docs" / "guide", ROOT) == text
    assert site_hooks.targets(text) == []


def test_a_file_of_code_is_shown_whole(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Has a fence: ```."""\n')

    text = site_hooks.page_text(tmp_path / "a.py", tmp_path)

    assert '# a.py\n\n````python\n"""Has a fence: ```."""\n````\n' in text
