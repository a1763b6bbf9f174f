"""The scrape in docs/guide/monitoring.md shows declared families, and the command replaces it."""

from pathlib import Path

from kvtier.observe.metrics import FAMILIES
from scripts.pasted_scrape import MARK, SHOWN, shown_lines, with_scrape

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "monitoring.md").read_text(encoding="utf-8")

SCRAPED = """# HELP kvtier_host_held_blocks Blocks.
kvtier_host_held_blocks 8.0
kvtier_host_held_blocks_of_others 9.0
kvtier_loaded_tokens_total{tier="slab"} 32.0
"""


def test_each_sample_on_the_page_is_of_a_declared_family() -> None:
    names = {family.sample_name + ending for family in FAMILIES for ending in ("", "_sum", "_count")}
    block = PAGE.partition(MARK)[2].partition("```text\n")[2].partition("```")[0]

    assert set(SHOWN) <= names
    shown = [line.partition(" ")[0].partition("{")[0] for line in block.splitlines()]
    assert set(shown) <= set(SHOWN)
    assert len(shown) > 10


def test_the_command_shows_chosen_samples_in_the_order_of_the_page() -> None:
    assert shown_lines(SCRAPED) == [
        'kvtier_loaded_tokens_total{tier="slab"} 32.0',
        "kvtier_host_held_blocks 8.0",
    ]


def test_the_command_replaces_the_block_and_nothing_else() -> None:
    before, _, after = PAGE.partition(MARK)
    pasted = with_scrape(PAGE, SCRAPED)

    assert pasted.startswith(before + MARK + '```text\nkvtier_loaded_tokens_total{tier="slab"} 32.0\n')
    assert pasted.endswith(after.partition("```\n")[2].partition("```\n")[2])
    assert with_scrape(pasted, SCRAPED) == pasted
