"""A model's identity together with what the model computed of a few tokens, so that a tier can be checked for it.

Two models may have one name: the same revision was given for other weights. What they compute differs. The engine hands
the page over with the model, and a tier keeps the first engine's beside the namespace's document.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.config import ModelIdentity


@dataclass(frozen=True, slots=True, eq=False)
class NamespacePage:
    """What a model computed of a few tokens.

    Attributes:
        data: that, as bytes.
        differs: returns in what another page differs, "" where it is that of the same model. Thread: any.
    """

    data: bytes = field(repr=False)
    differs: Callable[[bytes], str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ProbedModel(ModelIdentity):
    """The identity of a model that has computed a page, which is no part of it.

    Attributes:
        page: what it computed; None of a model that was not asked.
    """

    page: NamespacePage | None = field(default=None, compare=False, repr=False)
