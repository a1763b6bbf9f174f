"""Folders for control sockets, engines and sites that close at the end of their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.observe.controlled import Engine
from tests.observe.site import MakeSite, MakeTier, Site

MakeControlled = Callable[..., Engine]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: the address of a socket has a hundred bytes."""
    with TemporaryDirectory(prefix="kvtier-") as name:
        yield Path(name)


@pytest.fixture
def make_controlled(folder: Path) -> Iterator[MakeControlled]:
    """Return a function that makes an engine with a control socket in ``folder``."""
    engines: list[Engine] = []

    def make(*arguments: object, **settings: object) -> Engine:
        engines.append(Engine(folder, *arguments, **settings))  # type: ignore[arg-type]  # as Engine's
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_site() -> Iterator[MakeSite]:
    """Build engines, and end them."""
    sites: list[Site] = []

    def make(*make_tiers: MakeTier, **options: object) -> Site:
        sites.append(Site(make_tiers=make_tiers, **options))  # type: ignore[arg-type]  # the fields of Site
        return sites[-1]

    yield make
    for site in sites:
        site.close()
