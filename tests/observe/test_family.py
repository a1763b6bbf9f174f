"""How a number's dotted name becomes a family with labels."""

import pytest

from kvtier.observe.family import Family, Kind, SampleFinder, unread


def family(path: str, name: str = "kvtier_x", kind: Kind = Kind.COUNTER, vllm_name: str = "") -> Family:
    """Return a family that reads ``path``."""
    return Family(name, kind, "Help.", path, "blocks", vllm_name)


def test_parts_in_braces_are_labels() -> None:
    read = family("tier.{tier_index}.{tier}.errors")

    assert read.labels == ("tier_index", "tier")
    assert read.label_values("tier.2.fs.errors") == ("2", "fs")
    assert read.label_values("tier.0.my.tiers:Slow.errors") == ("0", "my.tiers:Slow")
    assert read.label_values("tier.2.fs.errors_of_others") is None
    assert read.label_values("tier.x.fs.errors") is None
    assert read.label_values("tier.2.fs.more.errors") == ("2", "fs.more")


def test_a_label_may_have_certain_values_only() -> None:
    read = family("tier.{tier_index}.{tier}.{cause:absent|damaged}")

    assert read.labels == ("tier_index", "tier", "cause")
    assert read.label_values("tier.0.fs.damaged") == ("0", "fs", "damaged")
    assert read.label_values("tier.0.fs.stored") is None


def test_a_number_may_have_several_names() -> None:
    read = family("tier.{tier_index}.{tier}.<existed|held_blocks>")

    assert read.labels == ("tier_index", "tier")
    assert read.label_values("tier.1.obj.existed") == ("1", "obj")
    assert read.label_values("tier.1.valkey.held_blocks") == ("1", "valkey")
    assert read.label_values("tier.1.valkey.existed_held_blocks") is None


def test_a_cause_that_is_about_no_tier_has_an_empty_one() -> None:
    read = family("connector.missed_tokens.{cause}[.{tier}]")

    assert read.labels == ("cause", "tier")
    assert read.label_values("connector.missed_tokens.never_seen") == ("never_seen", "")
    assert read.label_values("connector.missed_tokens.late.my.tier") == ("late", "my.tier")


def test_host_memory_is_named_as_operators_name_it() -> None:
    assert family("connector.loaded_tokens.{tier}").label_values("connector.loaded_tokens.CPU") == ("host",)


@pytest.mark.parametrize(
    ("kind", "vllm_name", "names"),
    [
        (Kind.COUNTER, "", ("kvtier_x_total", "kvtier_x_total")),
        (Kind.COUNTER, "vllm:y", ("kvtier_x_total", "vllm:y_total")),
        (Kind.GAUGE, "vllm:y", ("kvtier_x", "vllm:y")),
        (Kind.HISTOGRAM, "", ("kvtier_x", "kvtier_x")),
    ],
)
def test_queries_find_a_counter_by_its_ending(kind: Kind, vllm_name: str, names: tuple[str, str]) -> None:
    read = family("x", kind=kind, vllm_name=vllm_name)

    assert (read.sample_name, read.vllm_sample_name) == names


def test_what_no_family_reads_is_named() -> None:
    families = [family("a.x"), family("b.{tier}", "kvtier_y")]

    assert unread(families, ["a.x", "a.y", "b.c"]) == ["a.y"]
    found = SampleFinder(families).find("b.c")
    assert found is not None
    assert (found.family.name, found.label_values) == ("kvtier_y", ("c",))
