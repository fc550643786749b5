"""What of a plan goes into the engine's step, and in which shapes.

A step is compiled for a few numbers of runs, so exactly as many are taken out of a plan as one of them
says: nothing is padded, and what is left goes another way.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from tpu_offload.kernels.copier import Ids, Rows, Segment
from tpu_offload.kernels.fused import FusedInputs, FusedStep
from tpu_offload.kernels.spec import TransferSpec
from tpu_offload.types import Direction

_DEFAULT_NUM_RUNS = 8

Groups = list[tuple[int, Rows]]
"""Blocks to copy, by segment."""


@final
class FusedPlanner:
    """Takes out of saves and loads what a step copies.

    Args:
      spec: shapes.
      run_blocks: blocks in a run, those of a chunk: their places in the segment are adjacent.
      sizes: per direction, the numbers of runs that steps are compiled for, ascending.
    """

    def __init__(self, spec: TransferSpec, *, run_blocks: int, sizes: Mapping[Direction, tuple[int, ...]]) -> None:
        self._spec = spec
        self._run_blocks = run_blocks
        self._sizes = sizes

    def take(
        self, direction: Direction, groups: Groups, *, usable: Callable[[int], bool], max_blocks: int | None = None
    ) -> tuple[Groups, Groups]:
        """Takes runs of one segment, as many as a step is compiled for.

        Args:
          direction: save or load.
          groups: what is to be copied.
          usable: whether a segment may be used.
          max_blocks: at most so many blocks; None for what the sizes allow.
        Returns:
          At most one group that the step copies, and the groups that are left.
        """
        sizes = self._sizes[direction]
        if max_blocks is not None:
            sizes = tuple(size for size in sizes if size * self._run_blocks <= max_blocks)
        for i, (segment_id, rows) in enumerate(groups):
            if not usable(segment_id):
                continue
            runs, rest = split_runs(rows, run_blocks=self._run_blocks, sizes=sizes)
            if len(runs):
                left = [(segment_id, rest)] if len(rest) else []
                return [(segment_id, runs)], [*groups[:i], *left, *groups[i + 1 :]]
        return [], groups

    def step(self, save: tuple[Segment, Rows] | None, load: tuple[Segment, Rows] | None) -> FusedStep:
        """What the step is called with: a segment and runs as `take` gave them out, for each direction."""
        return make_fused_step(self._spec, run_blocks=self._run_blocks, save=save, load=load)

    def shapes(self) -> list[FusedStep]:
        """Shape structs of every step that copies anything."""
        saves, loads = ((0, *self._sizes[d]) for d in (Direction.SAVE, Direction.LOAD))
        return [
            fused_step_structs(self._spec, run_blocks=self._run_blocks, num_saves=num_saves, num_loads=num_loads)
            for num_saves, num_loads in itertools.product(saves, loads)
            if 0 < (num_saves + num_loads) * self._run_blocks <= self._spec.capacity
        ]


def make_fused_step(
    spec: TransferSpec,
    *,
    run_blocks: int,
    save: tuple[Segment, Rows] | None = None,
    load: tuple[Segment, Rows] | None = None,
) -> FusedStep:
    """Puts together what a step is called with.

    Args:
      spec: shapes.
      run_blocks: blocks in a run.
      save: the segment to save into, and rows as `split_runs` takes them out.
      load: the segment to load from, and likewise.
    """

    def ids(rows: Rows | None) -> tuple[Any, Any]:
        if rows is None:
            return np.zeros((0, run_blocks), np.int32), np.zeros(0, np.int32)
        return rows.block_ids.reshape(-1, run_blocks), rows.host_block_ids[::run_blocks].copy()

    (save_segment, save_rows), (load_segment, load_rows) = save or ([], None), load or ([], None)
    return FusedStep(save_segment, FusedInputs(*ids(save_rows), *ids(load_rows), load_segment, spec))


def fused_step_structs(spec: TransferSpec, *, run_blocks: int, num_saves: int, num_loads: int) -> FusedStep:
    """Shapes and shardings of a step that saves and loads so many runs."""

    def ids(num_runs: int) -> tuple[Any, Any]:
        shapes = (num_runs, run_blocks), (num_runs,)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spec.replicated) for shape in shapes)  # type: ignore[return-value]

    segment: Any = spec.segment_structs()
    inputs = FusedInputs(*ids(num_saves), *ids(num_loads), segment if num_loads else [], spec)
    return FusedStep(segment if num_saves else [], inputs)


def fused_sizes(capacity: int, *, run_blocks: int, buckets: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Numbers of runs that a step is compiled for, ascending; none if not even one run fits.

    Args:
      capacity: most blocks that may be on their way; the staging budget.
      run_blocks: blocks in a run.
      buckets: numbers of blocks to compile for. By default one size, of up to eight runs: each further one
        compiles the engine's step again.
    """
    most = capacity // run_blocks
    sizes = {bucket // run_blocks for bucket in buckets} if buckets else {min(_DEFAULT_NUM_RUNS, most)}
    return tuple(sorted(size for size in sizes if 0 < size <= most))


def split_runs(rows: Rows, *, run_blocks: int, sizes: tuple[int, ...]) -> tuple[Rows, Rows]:
    """Takes out of `rows` what one step can copy.

    Args:
      rows: blocks of one segment, of one or more jobs.
      run_blocks: blocks in a run.
      sizes: compiled numbers of runs, ascending.
    Returns:
      Rows of whole runs, as many as one of `sizes` says, run after run; and the rest. Either may be empty.
    """
    starts = _run_starts(rows.host_block_ids, run_blocks)
    fitting = [size for size in sizes if size <= len(starts)]
    if not fitting:
        return rows.take(slice(0, 0)), rows
    chosen = (starts[: fitting[-1], None] + np.arange(run_blocks)).ravel()
    rest = np.ones(len(rows), bool)
    rest[chosen] = False
    return rows.take(chosen), rows.take(rest)


def _run_starts(host_block_ids: Ids, run_blocks: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Where `run_blocks` adjacent places begin that are one chunk."""
    if len(host_block_ids) < run_blocks:
        return np.zeros(0, np.intp)
    windows = np.lib.stride_tricks.sliding_window_view(host_block_ids, run_blocks)
    adjacent = (windows - windows[:, :1] == np.arange(run_blocks)).all(axis=1)
    starts: np.ndarray[Any, np.dtype[np.intp]] = np.flatnonzero(adjacent & (windows[:, 0] % run_blocks == 0))
    return starts
