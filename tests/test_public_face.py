"""``import kvtier`` offers the names that the documents promise."""

import importlib.metadata

import kvtier


def test_the_version_is_that_of_the_installed_package() -> None:
    assert kvtier.__version__ == importlib.metadata.version("kvtier")


def test_every_promised_name_exists() -> None:
    assert all(hasattr(kvtier, name) for name in kvtier.__all__)


def test_a_key_made_here_is_taken_apart_here() -> None:
    key = kvtier.make_offload_key(b"hash", 7)

    assert (kvtier.get_offload_block_hash(key), kvtier.get_offload_group_idx(key)) == (b"hash", 7)
