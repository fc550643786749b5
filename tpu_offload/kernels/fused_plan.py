"""Selects the copies that go into the engine's step, in compiled shapes.

A step is compiled for a few numbers of chunks. Exactly one of these numbers is taken, without padding; the remaining
copies use another path.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from tpu_offload.kernels.copier import BlockMoves, Ids, Segment
from tpu_offload.kernels.fused import FusedInputs, FusedStep
from tpu_offload.kernels.spec import TransferSpec
from tpu_offload.types import Direction

_DEFAULT_NUM_CHUNKS = 8

BySegment = list[tuple[int, BlockMoves]]
"""Blocks to copy, by segment."""


@final
class FusedPlanner:
    """Selects the saves and loads that a step copies.

    Args:
      spec: shapes.
      blocks_per_chunk: blocks in a chunk; their positions in the segment are adjacent.
      sizes: per direction, the numbers of chunks that steps are compiled for, ascending.
    """

    def __init__(
        self, spec: TransferSpec, *, blocks_per_chunk: int, sizes: Mapping[Direction, tuple[int, ...]]
    ) -> None:
        self._spec = spec
        self._blocks_per_chunk = blocks_per_chunk
        self._sizes = sizes

    def take(
        self, direction: Direction, groups: BySegment, *, usable: Callable[[int], bool], max_blocks: int | None = None
    ) -> tuple[BySegment, BySegment]:
        """Takes chunks of one segment, as many as a step is compiled for.

        Args:
          direction: save or load.
          groups: the blocks to copy.
          usable: whether a segment may be used.
          max_blocks: limit in blocks; None for no limit beyond `sizes`.
        Returns:
          At most one group that the step copies, and the remaining groups.
        """
        sizes = self._sizes[direction]
        if max_blocks is not None:
            sizes = tuple(size for size in sizes if size * self._blocks_per_chunk <= max_blocks)
        for i, (segment_id, moves) in enumerate(groups):
            if not usable(segment_id):
                continue
            taken, rest = take_chunks(moves, blocks_per_chunk=self._blocks_per_chunk, sizes=sizes)
            if len(taken):
                left = [(segment_id, rest)] if len(rest) else []
                return [(segment_id, taken)], [*groups[:i], *left, *groups[i + 1 :]]
        return [], groups

    def step(self, save: tuple[Segment, BlockMoves] | None, load: tuple[Segment, BlockMoves] | None) -> FusedStep:
        """The arguments of the step: for each direction a segment and the moves that `take` returned."""
        return make_fused_step(self._spec, blocks_per_chunk=self._blocks_per_chunk, save=save, load=load)

    def shapes(self) -> list[FusedStep]:
        """Shape structs of every step variant that copies something."""
        saves, loads = ((0, *self._sizes[d]) for d in (Direction.SAVE, Direction.LOAD))
        return [
            fused_step_structs(
                self._spec, blocks_per_chunk=self._blocks_per_chunk, num_saves=num_saves, num_loads=num_loads
            )
            for num_saves, num_loads in itertools.product(saves, loads)
            if 0 < (num_saves + num_loads) * self._blocks_per_chunk <= self._spec.capacity
        ]


def make_fused_step(
    spec: TransferSpec,
    *,
    blocks_per_chunk: int,
    save: tuple[Segment, BlockMoves] | None = None,
    load: tuple[Segment, BlockMoves] | None = None,
) -> FusedStep:
    """Builds the arguments of a step.

    Args:
      spec: shapes.
      blocks_per_chunk: blocks in a chunk.
      save: the segment to save into, and moves from `take_chunks`.
      load: the segment to load from, and moves from `take_chunks`.
    """

    def ids(moves: BlockMoves | None) -> tuple[Any, Any]:
        if moves is None:
            return np.zeros((0, blocks_per_chunk), np.int32), np.zeros(0, np.int32)
        return moves.block_ids.reshape(-1, blocks_per_chunk), moves.host_block_ids[::blocks_per_chunk].copy()

    (save_segment, save_moves), (load_segment, load_moves) = save or ([], None), load or ([], None)
    return FusedStep(save_segment, FusedInputs(*ids(save_moves), *ids(load_moves), load_segment, spec))


def fused_step_structs(spec: TransferSpec, *, blocks_per_chunk: int, num_saves: int, num_loads: int) -> FusedStep:
    """Shapes and shardings of a step that saves `num_saves` chunks and loads `num_loads`."""

    def ids(num_chunks: int) -> tuple[Any, Any]:
        shapes = (num_chunks, blocks_per_chunk), (num_chunks,)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spec.replicated) for shape in shapes)  # type: ignore[return-value]

    segment: Any = spec.segment_structs()
    inputs = FusedInputs(*ids(num_saves), *ids(num_loads), segment if num_loads else [], spec)
    return FusedStep(segment if num_saves else [], inputs)


def fused_sizes(capacity: int, *, blocks_per_chunk: int, buckets: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The numbers of chunks that a step is compiled for, ascending; empty if not even one chunk fits.

    Args:
      capacity: most blocks that may be in flight: the staging budget.
      blocks_per_chunk: blocks in a chunk.
      buckets: numbers of blocks to compile for. The default is one size of up to eight chunks: each further size
        compiles the engine's step again.
    """
    most = capacity // blocks_per_chunk
    sizes = {bucket // blocks_per_chunk for bucket in buckets} if buckets else {min(_DEFAULT_NUM_CHUNKS, most)}
    return tuple(sorted(size for size in sizes if 0 < size <= most))


def take_chunks(moves: BlockMoves, *, blocks_per_chunk: int, sizes: tuple[int, ...]) -> tuple[BlockMoves, BlockMoves]:
    """Splits off the moves that one step can copy.

    Args:
      moves: blocks of one segment, of one or more jobs.
      blocks_per_chunk: blocks in a chunk.
      sizes: compiled numbers of chunks, ascending.
    Returns:
      The moves of whole chunks, one chunk after another, their number being one of `sizes`; and the rest. Either may be
      empty.
    """
    starts = _chunk_starts(moves.host_block_ids, blocks_per_chunk)
    fitting = [size for size in sizes if size <= len(starts)]
    if not fitting:
        return moves.take(slice(0, 0)), moves
    chosen = (starts[: fitting[-1], None] + np.arange(blocks_per_chunk)).ravel()
    rest = np.ones(len(moves), bool)
    rest[chosen] = False
    return moves.take(chosen), moves.take(rest)


def _chunk_starts(host_block_ids: Ids, blocks_per_chunk: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Indices at which the `blocks_per_chunk` adjacent positions of a whole chunk start."""
    if len(host_block_ids) < blocks_per_chunk:
        return np.zeros(0, np.intp)
    windows = np.lib.stride_tricks.sliding_window_view(host_block_ids, blocks_per_chunk)
    adjacent = (windows - windows[:, :1] == np.arange(blocks_per_chunk)).all(axis=1)
    starts: np.ndarray[Any, np.dtype[np.intp]] = np.flatnonzero(adjacent & (windows[:, 0] % blocks_per_chunk == 0))
    return starts
