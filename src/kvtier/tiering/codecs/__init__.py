"""How rows are encoded in secondary tiers: the contract and the names, one codec per file."""

from kvtier.tiering.codecs.base import CODECS, Codec

__all__ = ["CODECS", "Codec"]
