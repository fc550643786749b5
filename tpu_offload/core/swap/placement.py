"""Finds which blocks of a swap-out need no copy, because the host tier or the swap pool has their contents."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

from tpu_offload import hashing
from tpu_offload.core.context import TierContext
from tpu_offload.core.jobs import host_blocks
from tpu_offload.core.swap.pool import HostBlocks
from tpu_offload.types import BlockHash, ChunkKey


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the blocks of one swap-out are in host memory, or will be copied from.

    Attributes:
      tier_keys: chunks of the host tier that hold the first blocks; not pinned yet.
      tier_slots: the slots of those chunks.
      tier_blocks: the blocks' places in the host tier.
      shared: by position in the first group's block table, places in the swap pool with the same contents; not held
        yet.
      copied: positions in the first group's block table of the blocks to copy, ascending.
      sources: per layer group, the blocks of HBM to copy.
      hashes: the contents of the first of the copied blocks of the first group, those that are full and hashed.
    """

    tier_keys: Sequence[ChunkKey]
    tier_slots: tuple[int, ...]
    tier_blocks: tuple[int, ...]
    shared: Mapping[int, int]
    copied: Sequence[int]
    sources: Sequence[Sequence[int]]
    hashes: Sequence[BlockHash]

    @property
    def num_copied(self) -> list[int]:
        """Blocks to copy, per layer group."""
        return list(map(len, self.sources))

    def pool_blocks(self, allocated: HostBlocks) -> HostBlocks:
        """Places in the swap pool of all blocks that the host tier does not have, in the order of the block tables.

        Args:
          allocated: per layer group, the places that `sources` are copied to.
        """
        places = {**self.shared, **dict(zip(self.copied, allocated[0], strict=True))}
        return tuple(places[i] for i in sorted(places)), *allocated[1:]


def place_blocks(
    context: TierContext, block_tables: Sequence[Sequence[int]], block_hashes: Sequence[BlockHash]
) -> Placement:
    """Looks up the leading full blocks in the host tier, and the other full ones in the swap pool.

    Args:
      context: the scheduler's shared state; not modified.
      block_tables: per layer group, the blocks that hold computed tokens.
      block_hashes: hashes of the full blocks of the first group that may be shared.
    """
    blocks_per_chunk = context.blocks_per_chunk
    tier_keys, tier_slots = _find_in_tier(context, block_hashes)
    num_tier = len(tier_keys) * blocks_per_chunk
    found = context.swap_pool.find(block_hashes[num_tier:])
    shared = {i: place for i, place in enumerate(found, num_tier) if place is not None}
    first, *others = block_tables
    copied = [i for i in range(num_tier, len(first)) if i not in shared]
    return Placement(
        tier_keys=tier_keys,
        tier_slots=tier_slots,
        tier_blocks=host_blocks(tier_slots, blocks_per_chunk=blocks_per_chunk, num_blocks=num_tier),
        shared=shared,
        copied=copied,
        sources=[[first[i] for i in copied], *others],
        hashes=[block_hashes[i] for i in copied if i < len(block_hashes)],
    )


def _find_in_tier(
    context: TierContext, block_hashes: Sequence[BlockHash]
) -> tuple[Sequence[ChunkKey], tuple[int, ...]]:
    """Keys and slots of the leading chunks of these blocks that the host tier has."""
    if not len(context.index):
        return (), ()
    keys = hashing.chunk_keys(block_hashes, blocks_per_chunk=context.blocks_per_chunk, namespace=context.keys.namespace)
    slots = context.index.find(keys)
    return keys[: len(slots)], tuple(slots)
