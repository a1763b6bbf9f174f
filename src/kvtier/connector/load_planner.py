"""Which keys a load reads and which device blocks it writes. It pins nothing and asks nobody."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.base import GPULoadStoreSpec, OffloadKey
from kvtier.connector.groups import GroupLayout
from kvtier.errors import InvariantError


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load.

    Attributes:
        keys: the blocks, ordered by group.
        device_spec: where their bytes go.
    """

    keys: list[OffloadKey]
    device_spec: GPULoadStoreSpec


def iterate_load_keys(
    layouts: Sequence[GroupLayout], keys: Sequence[Sequence[OffloadKey]], first_token: int, end_token: int
) -> Iterator[OffloadKey]:
    """Yield the keys that a load of the tokens in between reads, ordered by group. Pure."""
    for layout in layouts:
        span = layout.span(first_token, end_token)
        yield from keys[layout.idx][span.first_block : span.end_block]


def plan_load(
    layouts: Sequence[GroupLayout],
    keys: Sequence[Sequence[OffloadKey]],
    block_ids: Sequence[Sequence[int]],
    first_token: int,
    end_token: int,
) -> LoadPlan:
    """Return the load that extends a prefix of ``first_token`` tokens to ``end_token``. Pure.

    Raises:
        InvariantError: the engine allocated fewer device blocks than it promised to load.
    """
    device_ids: list[int] = []
    group_sizes: list[int] = []
    block_indices: list[int] = []
    for layout in layouts:
        span = layout.span(first_token, end_token)
        ids = block_ids[layout.idx][span.first_device_block : span.end_device_block]
        if len(ids) != span.end_device_block - span.first_device_block:
            raise InvariantError(
                f"group {layout.idx} has {len(block_ids[layout.idx])} device blocks, but loading up to token "
                f"{end_token} needs {span.end_device_block}: allocate them before update_state_after_alloc"
            )
        device_ids.extend(ids)
        group_sizes.append(len(ids))
        block_indices.append(span.first_device_block)
    return LoadPlan(
        list(iterate_load_keys(layouts, keys, first_token, end_token)),
        GPULoadStoreSpec(device_ids, group_sizes, block_indices),
    )
