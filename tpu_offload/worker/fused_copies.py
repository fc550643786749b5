"""The copies inside the engine's own step (see `kernels.fused`): planned before it, turned into flights after it."""

import dataclasses
from typing import final

from tpu_offload.errors import TransferError
from tpu_offload.kernels import BlockMoves, BySegment, Flight, FusedOutcome, FusedPlanner, FusedStep, Phase, fetch_early
from tpu_offload.types import Direction
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.page_group_copies import PageGroupCopies


@dataclasses.dataclass(slots=True)
class _ForwardPass:
    """What the current forward pass copies, and what must follow it.

    Attributes:
      fused: per direction that is copied, the segment and the blocks.
      saving_job_ids: saves whose dispatch ends after the pass.
      saves: the blocks of those saves that the pass does not copy.
    """

    fused: dict[Direction, tuple[int, BlockMoves]]
    saving_job_ids: list[int]
    saves: BySegment


@final
class ForwardPassCopies:
    """All methods are called by the thread that dispatches the model.

    Args:
      group: the copies of the only page group.
      planner: selects what fits into a step.
      jobs: the worker's jobs in flight.
      staging_blocks: most blocks that a step may hold in HBM, both directions together.
    """

    def __init__(self, group: PageGroupCopies, planner: FusedPlanner, *, jobs: WorkerJobs, staging_blocks: int) -> None:
        self._group = group
        self._planner = planner
        self._jobs = jobs
        self._staging_blocks = staging_blocks
        self._pass: _ForwardPass | None = None

    @property
    def awaits_pass(self) -> bool:
        """Whether a forward pass was planned and has not returned yet."""
        return self._pass is not None

    def plan(self, job_ids: list[int], saves: BySegment, loads: BySegment, *, has_saves: bool) -> BySegment:
        """Selects what the forward pass copies.

        Args:
          job_ids: the valid saves of the step.
          saves: their blocks; those that the pass does not copy are kept until it has returned.
          loads: the blocks to load before it.
          has_saves: whether the step has any saves, including invalid ones, which were reported.
        Returns:
          The remaining loads.
        """
        fused_saves, saves = self._planner.take(Direction.SAVE, saves, usable=self._can_fuse)
        # The step donates the segment that it saves into, so it cannot load from it.
        donated = [segment_id for segment_id, _ in fused_saves]
        # The step holds both directions in HBM, within the staging budget.
        room = self._staging_blocks - sum(len(moves) for _, moves in fused_saves)
        fused_loads, loads = self._planner.take(
            Direction.LOAD, loads, usable=lambda i: i not in donated and self._can_fuse(i), max_blocks=room
        )
        fused = {d: g[0] for d, g in ((Direction.SAVE, fused_saves), (Direction.LOAD, fused_loads)) if g}
        for _, moves in fused.values():
            self._jobs.add_ref(moves.jobs())
        if fused or has_saves:
            self._pass = _ForwardPass(fused, job_ids, saves)
        return loads

    def step(self) -> FusedStep:
        """See `OffloadWorker.fused_step`."""
        if self._pass is None or not self._pass.fused:
            return FusedStep()
        arena = self._group.memory.arena
        try:
            save, load = (
                (arena.segment(group[0]), group[1]) if group else None
                for group in map(self._pass.fused.get, (Direction.SAVE, Direction.LOAD))
            )
        except TransferError as e:  # lost since `begin_step`, as a `poll` in between has found
            self._fail(self._pass, e)
            return FusedStep()
        return self._planner.step(save, load)

    def shapes(self) -> list[FusedStep]:
        """See `OffloadWorker.fused_shapes`."""
        return self._planner.shapes()

    def end(self, outcome: FusedOutcome | None) -> tuple[list[int], BySegment]:
        """Turns the copies of the forward pass into flights; without an outcome they have failed.

        Returns:
          The saves whose dispatch ends now, and their blocks that are still to be copied.
        """
        done, self._pass = self._pass, None
        assert done is not None, "ask awaits_pass"
        if outcome is None:
            error = "the forward pass that was to copy it did not return; pass its FusedOutcome to end_step"
            self._fail(done, TransferError(error))
            return done.saving_job_ids, done.saves
        memory = self._group.memory
        for direction, (segment_id, moves) in done.fused.items():
            saving = direction is Direction.SAVE
            if saving:
                memory.arena.replace(segment_id, outcome.segment)
                memory.mark(segment_id, moves.host_block_ids, lost=False)
            else:
                self._jobs.mark_written(moves.jobs())
            token = fetch_early(outcome.save_token if saving else outcome.load_token, memory.spec)
            self._group.flights.append(Flight(direction, segment_id, moves, Phase.COPYING, token, fused=True))
        return done.saving_job_ids, done.saves

    def abandon(self) -> None:
        """The forward pass never returned: its copies have failed, and the saves that were to follow it fail too."""
        if self._pass is not None:
            job_ids, _ = self.end(None)
            self._jobs.drop_ref(
                job_ids, "the forward pass that was to compute its blocks did not return; call end_step after it"
            )

    def abort(self) -> None:
        """The forward pass was not executed: its loads have failed; its saves and those to follow it are cancelled."""
        done, self._pass = self._pass, None
        if done is None:
            return
        for job_id in done.saving_job_ids:
            self._jobs.cancel(job_id, unwritten=True)
        fused = done.fused.pop(Direction.SAVE, None)
        if fused is not None:
            segment_id, moves = fused
            self._group.memory.check_segment(segment_id, lost=False)
            self._jobs.drop_ref(moves.jobs())
        self._fail(done, TransferError("the forward pass that was to copy it was not executed"))
        self._jobs.drop_ref(done.saving_job_ids)

    def _fail(self, done: _ForwardPass, error: Exception) -> None:
        """Fails the copies inside the forward pass; the saves that follow it are unchanged."""
        fused, done.fused = done.fused, {}
        for segment_id, moves in fused.values():
            self._group.fail(moves, segment_id, error)

    def _can_fuse(self, segment_id: int) -> bool:
        """Whether a forward pass may use the segment.

        Not while a save into it is in flight: if that failed, the pass would fail with it.
        """
        try:
            self._group.memory.arena.segment(segment_id)
        except TransferError:
            return False
        return not any(
            flight.segment_id == segment_id and flight.direction is Direction.SAVE and not flight.fused
            for flight in self._group.flights
        )
