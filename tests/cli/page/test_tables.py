"""A page's tables and lists are HTML in which text from outside is text."""

from kvtier.cli.page.document import render_list
from kvtier.cli.page.tables import Cell, Table, render_facts, render_headline, render_table


def test_what_comes_from_outside_is_escaped() -> None:
    table = Table("t", "<caption>", ("<a>",), ((Cell("<script>"),),))

    rendered = render_table(table) + render_facts([("<name>", '"<value>"')])
    rendered += render_headline([("<number>", "<what>")]) + render_list(["<sentence>"])

    assert "<script>" not in rendered
    for text in ("caption", "a", "script", "name", "number", "what", "sentence"):
        assert f"&lt;{text}&gt;" in rendered
    assert "&quot;&lt;value&gt;&quot;" in rendered


def test_a_number_has_its_exact_value_behind_its_text() -> None:
    rendered = render_table(Table("t", "c", ("n",), ((Cell("12.3%", 0.1234),),)))

    assert '<td class="number" data-value="0.1234">12.3%</td>' in rendered
    assert '<th scope="col" class="number">n</th>' in rendered


def test_without_sentences_there_is_no_list() -> None:
    assert render_list([]) == ""
