"""What a tier says of blocks that it misses and another namespace of its backend holds.

That it names the namespace and the field that differs is in ``TierSuite``, for tiers with ``names_siblings``.
"""

import logging

import pytest
from tests.tiering.roles.bench import RoleSuite, needs

from kvtier.misses import MissCause
from kvtier.namespace import parse_document
from kvtier.testing.tier_driver import TierDriver, key_of

HOSTILE = {
    "nothing": b"",
    "no JSON": b"{" * 10,
    "another document": b'{"a": 1}',
    "no object": b"[1]",
    "deep": b'{"layout_version": 1, "model": ' + b'{"a":' * 9000 + b"1" + b"}" * 9000 + b"}",
    "huge": b'{"layout_version": 1, "model": "' + b"a" * 2**24 + b'"}',
    "no text": bytes(range(128, 256)),
}
"""What a namespace's description may be instead."""


LOOK_AGAIN_S = 3600.0
"""Longer than any pause between two looks, and than a lookup's answer is believed."""


class Siblings(RoleSuite):
    """Namespaces of other models in one backend."""

    def words_of(self, model: str, own: str = "model-a") -> dict[str, str | float]:
        """Return what is said of a block that the namespace of ``model`` holds."""
        return {"namespace": self.namespace_of(model)[:8], "model.name": f"{model} (here {own})"}

    def ask(self, driver: TierDriver, number: int = 1) -> dict[str, str | float] | None:
        """Return what is said of a missing block; None when no sibling is said to have it."""
        self.clock.advance(LOOK_AGAIN_S)
        assert not driver.lookup(number)
        miss = driver.tier.explain(key_of(number), driver.request)
        return None if miss is None or miss.cause is not MissCause.OTHER_NAMESPACE else dict(miss.detail)

    def start_asking(self, model: str = "model-a") -> TierDriver:
        """Return a tier that looks again whenever it is asked."""
        return self.start(model, clock=self.clock)

    @needs("siblings", "a line")
    def test_an_empty_namespace_next_to_a_full_one_is_said_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        assert self.start("model-b").store(list(range(10))).success
        driver = self.start_asking()
        assert self.ask(driver, 1) == self.ask(driver, 2) == self.words_of("model-b")
        (line,) = [text for text in caplog.messages if "holds nothing here" in text]
        own, sibling = (self.namespace_of(model)[:8] for model in ("model-a", "model-b"))
        num_blocks = "an unknown number of" if "counts" in self.lacks else "10"
        assert line == (
            f"tier {driver.tier.get_tier_type()}: namespace {own} holds nothing here; {sibling} has {num_blocks} "
            "blocks and differs in model.name model-b (here model-a)"
        )
        caplog.clear()
        assert driver.store([1]).success
        assert self.ask(self.start_asking(), 2) == self.words_of("model-b")
        assert not [text for text in caplog.messages if "holds nothing here" in text], "it has a block by now"

    @needs("siblings")
    def test_of_a_block_that_no_namespace_holds_nothing_is_said(self) -> None:
        assert self.start("model-b").store([1]).success
        driver = self.start_asking()
        assert self.ask(driver, 2) is None
        assert self.ask(driver, 1) is not None

    @needs("siblings")
    def test_of_several_namespaces_the_one_that_holds_the_block_is_named(self) -> None:
        assert self.start("model-b").store([1]).success
        assert self.start("model-c").store([2]).success
        driver = self.start_asking()
        assert self.ask(driver, 1) == self.words_of("model-b")
        assert self.ask(driver, 2) == self.words_of("model-c")

    @needs("siblings")
    def test_a_namespace_that_was_removed_is_named_no_more(self) -> None:
        for model in ("model-a", "model-b"):
            assert self.start(model).store([1]).success
        num_foreign = self.count_foreign()
        assert self.remove_namespace(self.namespace_of("model-b")) == 1
        assert self.ask(self.start_asking("model-c")) == self.words_of("model-a", "model-c")
        assert {block.namespace for block in self.list_blocks()} == {self.namespace_of()}
        place = self.tier_class.open_place(self.own_settings())
        try:
            names = {one.name: one for one in place.namespaces()}
        finally:
            place.close()
        left = names.pop(self.namespace_of())
        assert not names or "whole removals" in self.lacks
        assert parse_document(left.document)["model"]["name"] == "model-a"
        assert self.count_foreign() == num_foreign, "what is left of a namespace is nobody's"

    @needs("siblings", "documents")
    @pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
    def test_a_hostile_description_costs_its_own_words_only(self, text: bytes) -> None:
        for model in ("model-b", "model-c"):
            assert self.start(model).store([1]).success
        backend = self.get_backend()
        backend.write(backend.document_name(self.namespace_of("model-b")), text)
        driver = self.start_asking()
        assert self.ask(driver) == self.words_of("model-c")
        assert driver.store([1]).success
        assert driver.load_right([1]) == {1}
        place = self.tier_class.open_place(self.own_settings())
        try:
            documents = {one.name: one.document for one in place.namespaces()}
        finally:
            place.close()
        assert documents.keys() == {self.namespace_of(model) for model in ("model-a", "model-b", "model-c")}
        assert len(documents[self.namespace_of("model-b")]) <= 2**20
