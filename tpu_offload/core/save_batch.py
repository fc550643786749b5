"""The chunks of one save job, as they are collected from requests."""

import dataclasses
from collections.abc import Sequence

from tpu_offload.core.block_tables import plain
from tpu_offload.core.request_state import RequestState
from tpu_offload.types import ChunkKey


@dataclasses.dataclass(slots=True)
class SaveBatch:
    """The chunks of one save job, as they are collected.

    Attributes:
      tables: per group with full attention, blocks of HBM.
      keys: the chunks in them.
      slots: the chunks' slots in the host tier.
      request_ids: the requests that hold the blocks.
    """

    tables: list[list[int]]
    keys: list[ChunkKey] = dataclasses.field(default_factory=list)
    slots: list[int] = dataclasses.field(default_factory=list)
    request_ids: list[str] = dataclasses.field(default_factory=list)

    def add(self, request: RequestState, chunks: Sequence[int], slots: list[int], blocks_per_chunk: int) -> None:
        """Adds the chunks of these numbers, ascending, of one request."""
        if len(chunks) == blocks_per_chunk == 1:  # fast path: a request that generates
            (first,) = chunks
            for group_id, blocks in enumerate(self.tables):
                blocks.append(int(request.block_tables[group_id][first]))
            self.keys.append(request.keys[first])
        else:
            self._add_all(request, chunks, blocks_per_chunk)
        self.slots += slots
        self.request_ids.append(request.request_id)

    def _add_all(self, request: RequestState, chunks: Sequence[int], size: int) -> None:
        first, end, keys = chunks[0], chunks[-1] + 1, request.keys
        are_consecutive = end - first == len(chunks)
        self.keys += keys[first:end] if are_consecutive else [keys[i] for i in chunks]
        for blocks, table in zip(self.tables, request.block_tables, strict=True):
            if are_consecutive:
                blocks += plain(table[first * size : end * size])
            else:
                block_ids = plain(table)
                blocks += [block_ids[i * size + j] for i in chunks for j in range(size)]
