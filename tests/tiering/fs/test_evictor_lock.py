"""One process evicts from a directory at a time, until it releases the lock."""

import os
from pathlib import Path

from kvtier.tiering.fs.folders import eviction_lock


def test_one_has_the_lock_at_a_time(tmp_path: Path) -> None:
    with eviction_lock(tmp_path, 0o600) as has_lock:
        assert has_lock
        with eviction_lock(tmp_path, 0o600) as has_second_lock:
            assert not has_second_lock
    with eviction_lock(tmp_path, 0o600) as has_lock:
        assert has_lock


def test_a_child_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    with eviction_lock(tmp_path, 0o600) as has_lock:
        assert has_lock
        child = os.fork()
        if child == 0:
            os.read(read_fd, 1)
            os._exit(0)
    try:
        with eviction_lock(tmp_path, 0o600) as has_lock:
            assert has_lock
    finally:
        os.write(write_fd, b"x")
        os.waitpid(child, 0)
        os.close(read_fd)
        os.close(write_fd)
