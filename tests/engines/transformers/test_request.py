"""A block's name stands for its tokens, everything before them, and the salt."""

import hashlib

from kvtier.engines.transformers.request import extend_block_hashes, hash_block, make_root_digest

ROOT = make_root_digest("")


def digests_of(token_ids: list[int], root: bytes = ROOT) -> list[bytes]:
    digests: list[bytes] = []
    extend_block_hashes(digests, token_ids, 4, root)
    return digests


def test_only_full_blocks_have_a_digest() -> None:
    assert [len(digests_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_digest_grows_with_its_sequence_and_never_changes() -> None:
    digests = digests_of([1, 2, 3, 4])
    before = list(digests)
    extend_block_hashes(digests, [1, 2, 3, 4, 5, 6, 7, 8], 4, ROOT)
    assert digests == digests_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert digests[:1] == before


def test_equal_blocks_after_different_prefixes_differ() -> None:
    assert digests_of([0, 0, 0, 0, 5, 6, 7, 8])[1] != digests_of([0, 0, 0, 1, 5, 6, 7, 8])[1]


def test_equal_blocks_at_different_places_differ() -> None:
    first, second = digests_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_different_salts_share_no_block() -> None:
    salted = digests_of(list(range(12)), make_root_digest("tenant"))
    assert not set(salted) & set(digests_of(list(range(12))))


def test_large_token_ids_do_not_wrap_around() -> None:
    assert hash_block(ROOT, [1]) != hash_block(ROOT, [1 + 2**32])


def test_the_chain_is_sha256_over_parent_and_tokens() -> None:
    tokens = b"".join(token.to_bytes(8, "little") for token in (9, 8))
    assert hash_block(ROOT, [9, 8]) == hashlib.sha256(ROOT + tokens).digest()
