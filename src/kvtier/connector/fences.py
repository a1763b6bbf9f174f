"""Device blocks that an unfinished store still reads.

It waits for nobody. A store holds no device block: the engine may free the block and give it to another
request. Whoever is about to write to it asks here, and the worker finishes those stores first.
"""

from collections.abc import Collection

from kvtier.base import TransferJobId


class BlockFences:
    """Which unfinished stores read which device blocks.

    Blocks are told apart by number alone. Engines whose groups have separate pools would at worst finish a
    store too early, never too late.
    """

    def __init__(self) -> None:
        # A tuple that all blocks of a store share, for it is rare that two stores read one block.
        self._jobs_by_block: dict[int, tuple[TransferJobId, ...]] = {}
        self._blocks_by_job: dict[TransferJobId, list[int]] = {}

    def add(self, job_id: TransferJobId, block_ids: list[int]) -> None:
        """Fence ``block_ids`` until the store ``job_id`` is removed."""
        self._blocks_by_job[job_id] = block_ids
        alone, jobs_by_block = (job_id,), self._jobs_by_block
        for block_id in block_ids:
            others = jobs_by_block.get(block_id)
            jobs_by_block[block_id] = alone if others is None else (*others, job_id)

    def remove(self, job_id: TransferJobId) -> None:
        """Lift the fence of a store; one that has none is ignored."""
        for block_id in self._blocks_by_job.pop(job_id, ()):
            jobs = self._jobs_by_block.pop(block_id)
            if len(jobs) > 1:
                self._jobs_by_block[block_id] = tuple(other for other in jobs if other != job_id)

    def take(self, block_ids: Collection[int]) -> set[TransferJobId]:
        """Return the stores that read any of ``block_ids``, and lift their fences.

        The caller makes every worker finish them in this step, so asking a second time would wait twice.
        """
        jobs_by_block = self._jobs_by_block
        if not jobs_by_block or not block_ids:
            return set()
        fenced = jobs_by_block.keys() & block_ids
        job_ids = {job_id for block_id in fenced for job_id in jobs_by_block[block_id]}
        # Each worker handles metadata in order, so once a flush is sent nothing later can overtake it.
        for job_id in job_ids:
            self.remove(job_id)
        return job_ids

    def __len__(self) -> int:
        return len(self._blocks_by_job)
