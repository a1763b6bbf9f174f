"""Plausible bugs of the production code, each as one replacement of text; what the storm and the suites must find.

A text that is not found exactly once fails the quick test beside the storm's: then the code has changed, and the bug
must be planted anew.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: what goes wrong, in a few words.
        path: the file, below ``src/kvtier``.
        old: what stands there, exactly once.
        new: what stands there instead.
        suite: tests that find it when the storm does not; "" when the storm must.
        also: further replacements in the same file, for a bug that stands in two places.
    """

    name: str
    path: str
    old: str
    new: str
    suite: str = ""
    also: tuple[tuple[str, str], ...] = ()

    def edits(self) -> tuple[tuple[str, str], ...]:
        """Return what is replaced by what. Pure."""
        return (self.old, self.new), *self.also


MUTANTS = (
    Mutant(
        "a job ends with its first worker",
        "connector/jobs.py",
        "if job.num_reports_missing > 0:",
        "if job.num_reports_missing > 1:",
    ),
    Mutant(
        "no store is flushed before its device block is written",
        "connector/jobs.py",
        "for block_id in self.fenced.keys() & block_ids for job_id",
        "for block_id in () for job_id",
    ),
    Mutant(
        "a load of before a reset is served",
        "connector/scheduler.py",
        "self._jobs_to_fail |= loads - self._load_jobs.keys()",
        "self._jobs_to_fail |= loads & self._load_jobs.keys()",
    ),
    Mutant(
        "a request loads again after a failed load",
        "connector/prefix_search.py",
        "        if state.load.has_failed:\n            return first_token\n",
        "",
    ),
    Mutant(
        "the last token of a prompt is loaded too",
        "connector/prefix_search.py",
        "max_end_token = state.request.num_tokens - 1",
        "max_end_token = state.request.num_tokens",
    ),
    Mutant(
        "blocks of before a reset are stored under the new weights",
        "connector/scheduler.py",
        "            state.on_reset()\n",
        "            pass\n",
    ),
    Mutant(
        "a failed store gives no slot back",
        "cpu/block_table.py",
        "self.slots.give_back([block.block_id for block in blocks if block is not None])\n            for key",
        "list(blocks)\n            for key",
    ),
    Mutant(
        "a pin of two readers ends with the first",
        "cpu/block_table.py",
        "                block.ref_cnt = num_pins - 1\n        self._count_idle",
        "                block.ref_cnt = 0\n                num_idle += 1\n        self._count_idle",
    ),
    Mutant(
        "a reset frees slots that are being written",
        "cpu/block_table.py",
        "idle_slots = [block.block_id for block in held.values() if block.ref_cnt == 0]",
        "idle_slots = [block.block_id for block in held.values() if block.ref_cnt <= 0]",
    ),
    Mutant(
        "a failed store makes its blocks ready",
        "cpu/manager.py",
        "        finished = table.finish_writes(keys, success=success)",
        "        finished = table.finish_writes(keys, success=True)",
    ),
    Mutant(
        "a failed promotion makes its blocks ready",
        "tiering/transfers.py",
        "            finish_writes(failed, success=False, is_promotion=True)",
        "            finish_writes(failed, success=True, is_promotion=True)",
    ),
    Mutant(
        "a finished cascade stays pinned",
        "tiering/transfers.py",
        "            self._table.unpin_each(metadata.keys)\n            return\n",
        "            self._table.unpin_each(metadata.keys[1:])\n            return\n",
    ),
    Mutant(
        "a promotion of before a reset counts as one of after it",
        "tiering/transfers.py",
        "            job.is_stale = True\n",
        "            job.is_stale = not job.metadata.is_promotion\n",
    ),
    Mutant(
        "a deadline never comes",
        "cpu/waiting.py",
        "self.by_deadline[0].deadline_s <= now_s:",
        "self.by_deadline[0].deadline_s <= 0:",
        "tests/cpu/test_waiting.py",
    ),
    Mutant(
        "a circuit breaker never closes again",
        "tiering/breaker.py",
        "            self.has_failures = False\n            self.is_closed = True\n",
        "            self.has_failures = False\n",
    ),
    Mutant(
        "a job is reported while a task of it runs",
        "tiering/kit/io_pool.py",
        "if job.num_running_tasks or job.num_begun < len(job.keys):",
        "if job.num_begun < len(job.keys):",
    ),
    Mutant(
        "a job that is overdue is forgotten",
        "tiering/kit/io_pool.py",
        "                queue.jobs.remove(job)\n                self._fail_unbegun(queue, job, is_timeout=True)",
        "                queue.jobs.remove(job)",
    ),
    Mutant(
        "answers of before a reset are believed after it",
        "tiering/kit/lookup.py",
        "            if answer.generation == self.generation:\n",
        "            if answer.generation <= self.generation:\n",
        "tests/tiering/kit/test_lookup.py",
    ),
    Mutant(
        "a checksum is not compared",
        "tiering/kit/envelope.py",
        "if num_stored != len(payload) or checksum != xxhash.xxh3_128_digest(payload):",
        "if num_stored != len(payload):",
    ),
    Mutant(
        "a header's key is not compared",
        "tiering/kit/envelope.py",
        "    if found_key[:key_bytes] != key:\n        return HeaderCheck.OTHER_KEY\n",
        "",
    ),
    Mutant(
        "a block that could not be recorded counts as stored",
        "tiering/fs/store.py",
        "succeeded = {*elsewhere, *plan.held, *kept, *others}",
        "succeeded = {*elsewhere, *plan.held, *kept, *others, *written}",
        "tests/tiering/fs",
    ),
    Mutant(
        "a slot is reused while a slow load reads it",
        "tiering/fs/slot_table.py",
        "        status.ref_cnt += 1\n        return SlotPin(key, status)",
        "        return SlotPin(key, BlockStatus(status.block_id))",
        "tests/tiering/fs",
    ),
    Mutant(
        "a pack's failed write counts as written",
        "tiering/fs/store.py",
        ' was not written: {error}")\n            return []\n',
        ' was not written: {error}")\n',
        "tests/tiering/fs",
    ),
    Mutant(
        "a refused SET counts as done",
        "tiering/valkey/blobs.py",
        '        if reply.kind != "-":\n            return WRITTEN',
        "        if reply.kind:\n            return WRITTEN",
        "tests/tiering/valkey/test_store.py tests/tiering/valkey/test_blobs.py",
    ),
    Mutant(
        "a tenant is left out of the keys of its blocks",
        "tenants.py",
        "        return Tenant(name, self.number_of(name), hash_key)\n",
        "        return Tenant(name, 0, hash_key[:0])\n",
    ),
    Mutant(
        "a tenant beyond its quota evicts blocks of others within theirs",
        "cpu/tenant_quotas.py",
        "        if num_left > num_within:\n",
        "        if num_left > num:\n",
    ),
    Mutant(
        "an expired block of a tier is served",
        "tiering/kit/lifetime.py",
        "<= now_s - stored_s < self.ttl_s\n",
        "<= now_s - stored_s\n",
    ),
    Mutant(
        "an expired block of host memory stays",
        "cpu/lifetimes.py",
        "        limit_s = self._clock() - self._ttl_s\n",
        "        limit_s = self._clock() - 50 * self._ttl_s\n",
    ),
    Mutant(
        "a nonce is used for every block",
        "tiering/kit/encryption.py",
        "        counter = next(self._counter)\n",
        "        counter = 0 * next(self._counter)\n",
    ),
    Mutant(
        "the tag of an encrypted block does not vouch for its header",
        "tiering/kit/encryption.py",
        "cipher.authenticate_additional_data(before + behind)",
        'cipher.authenticate_additional_data(b"")',
        "tests/tiering/kit/test_encryption.py",
        also=(
            (
                "cipher.authenticate_additional_data(additional_data(header))",
                'cipher.authenticate_additional_data(b"")',
            ),
        ),
    ),
    Mutant(
        "an encrypted block is written as it is",
        "tiering/kit/encryption.py",
        "return Sealed(join_encrypted_header(before, cipher.tag, behind), payload)",
        "return Sealed(join_encrypted_header(before, cipher.tag, behind), row)",
    ),
    Mutant(
        "the default's key serves a tenant whose key was dropped",
        "tiering/kit/encryption.py",
        "        if name is None and number in self._dropped:\n            return None\n",
        "",
    ),
    Mutant(
        "the purge of a tenant takes the blocks of all",
        "tiering/fs/own_blocks.py",
        "[key for key in self._adopted if get_offload_tenant(key) == tenant]",
        "list(self._adopted)",
        "tests/tiering/fs",
    ),
    Mutant(
        "ASK is taken for MOVED",
        "tiering/valkey/cluster.py",
        'is_asking=code == "ASK"',
        "is_asking=False",
        "tests/tiering/valkey/test_cluster.py",
    ),
    Mutant(
        "a transfer into Mooncake that failed counts as stored",
        "tiering/mooncake/blobs.py",
        "    if answer == Code.OK:\n        return WRITTEN",
        "    if answer in (Code.OK, Code.TRANSFER_FAIL):\n        return WRITTEN",
    ),
)
