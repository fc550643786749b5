"""Deliberate bugs in the library (mutations), and a way to run the simulation with one of them.

Each replaces a piece of syntax in one function of `tpu_offload/core`, which is named by its qualified name without the
module; `tests.simulation.patterns` describes the patterns. A mutation that does not match exactly one place is an
error.

No file is changed: the code of the function is exchanged in a process. `python -m tests.simulation.mutations` imports
the library once, forks a child for each mutation and prints a line of JSON for each with what the simulation found.

A search takes minutes, and a thousand runs for the rarest bugs, so the tests first try the seeds in `caught.json`,
which found each bug before. `--record` searches for bugs that their seeds no longer find and updates the file; use it
after changes that alter the course of many runs.

Most of this long file is the list of mutations.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import gc
import importlib
import json
import os
import signal
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.simulation.patterns import Function, PatternError, functions, replace

ROOT = Path(__file__).resolve().parents[2]
_CORE = Path("tpu_offload", "core")
_CAUGHT = Path(__file__).with_name("caught.json")
_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A deliberate bug.

    Attributes:
      name: its effect.
      function: qualified name of a function in `tpu_offload/core`.
      find: pattern that matches once.
      new: the replacement.
    """

    name: str
    function: str
    find: str
    new: str


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A module with a bug.

    Attributes:
      module: its name.
      path: its file, below the root of the repository.
      source: the source to run instead of the file.
    """

    module: str
    path: Path
    source: str


MUTATIONS = (
    # Ends of jobs.
    Mutation(
        "a failed load keeps its staging blocks",
        "Completion.complete",
        "self.release(...)",
        """
        if job.state is JobState.FAILED and not job.kind.writes_host:
            job.held.num_staging_blocks = 0
        _0
        """,
    ),
    Mutation(
        "staging blocks of a cancelled load are released twice",
        "Completion.complete",
        "self.release(...)",
        """
        _0
        if job.state is JobState.CANCELLED:
            self._staging.release(job.held.account, job.held.num_staging_blocks, job.direction)
        """,
    ),
    Mutation(
        "the unpin is skipped when a load fails",
        "Completion.complete",
        "self.release(...)",
        """
        job.held.are_pinned &= job.state is not JobState.FAILED
        _0
        """,
    ),
    Mutation("a late load is not cancelled on the workers", "Transfers.ended", "self._to_cancel[_] = _", "pass"),
    Mutation(
        "the load of an aborted request is not cancelled on the workers",
        "Transfers.detach",
        "self._to_cancel[_] = _",
        "pass",
    ),
    Mutation(
        "a queued load is sent after its request has ended",
        "LoadQueue.remove",
        "self._waiting.remove(...)",
        "pass",
    ),
    Mutation("a failed save is published", "Transfers._bad_slots", "return set(job.slots)", "return _NO_SLOTS"),
    Mutation(
        "the failed chunks of a partly failed save are published",
        "Transfers._bad_slots",
        "return {_1[_2] for _2 in job.failed_blocks}",
        "return _NO_SLOTS",
    ),
    Mutation("a partly failed load is used up to the last hole", "Transfers._resume_request", "min(_1)", "max(_1)"),
    Mutation(
        "a failed load counts as finished",
        "Transfers._resume_request",
        "_1.state is JobState.FINISHED",
        "_1.state is not JobState.TIMED_OUT",
    ),
    Mutation(
        "a stale update goes to the next request of the same id",
        "Transfers.forget_news",
        "[_1 for _1 in _2 if _]",
        "[_1 for _1 in _2]",
    ),
    Mutation(
        "the slots of a timed-out save are free immediately",
        "Transfers._end_save",
        "_.state is JobState.TIMED_OUT",
        "False",
    ),
    Mutation(
        "a load whose memory was lost counts as finished",
        "Transfers._fail_in",
        "_.failed_blocks |= _",
        "pass",
    ),
    # Reports of workers.
    Mutation("a job ends with the first worker's report", "JobTable.report", "not job.waiting_for", "True"),
    Mutation(
        "a duplicate counts for another worker",
        "Job.add_result",
        "self.waiting_for.remove(_)",
        "self.waiting_for.pop()",
    ),
    Mutation("a duplicate result is accepted", "JobTable.report", "... or worker_id not in _.waiting_for", "..."),
    Mutation(
        "a slot leaves quarantine with the first worker's report",
        "JobTable._report_late",
        "not job.waiting_for",
        "True",
    ),
    Mutation("a job whose result was lost counts as finished", "JobTable.ack_through", "_.mark_failed(...)", ""),
    Mutation(
        "the oldest job in flight of a worker counts as ended",
        "JobTable.ack_through",
        "_1.job_id < _2",
        "_1.job_id <= _2",
    ),
    Mutation("a timed-out save is forgotten", "JobTable.expire", "self._late[_] = _", "pass"),
    Mutation(
        "jobs time out a job too early", "JobTable.expire", "_1.deadline_s <= now_s", "_1.deadline_s <= now_s + 5.0"
    ),
    Mutation("jobs never time out", "JobTable.expire", "... and _.deadline_s <= now_s", "False"),
    Mutation(
        "reports of an earlier incarnation are applied",
        "ReportHandler._is_stale",
        "... or report.incarnation >= _",
        "True",
    ),
    Mutation(
        "the restart of a worker is not detected",
        "ReportHandler._check_incarnation",
        """
        if known:
            ...
        else:
            self._workers.set_epoch(_1)
            self._adopt_stored(_2)
        """,
        """
        if True:
            self._workers.set_epoch(_1)
            self._adopt_stored(_2)
        """,
    ),
    Mutation(
        "slots that a restarted worker lacks are used",
        "HostPools.restart",
        "self._index.shrink(...)",
        "pass",
    ),
    Mutation(
        "the host tier stays small after a restart with more memory than before",
        "HostPools.restart",
        "self._num_slots[_1] = self._none",
        "self._num_slots[_1] = report.num_host_slots",
    ),
    Mutation(
        "jobs of a restarted worker count as ended",
        "ReportHandler._handle_restart",
        "self._transfers.fail_in_flight(_1, ...)",
        "self._jobs.ack_through(_1, self._jobs.next_job_id)",
    ),
    Mutation(
        "a slot is used when the first worker has it",
        "HostPools._grow",
        "_smallest(_1, *self._num_slots.values())",
        "_smallest(_1, tuple([max(nums) for nums in zip(*self._num_slots.values())]))",
    ),
    Mutation(
        "lost slots are ignored", "ReportHandler._mark_slots_lost", "self._transfers.mark_slots_lost(...)", "pass"
    ),
    # Reset.
    Mutation("a reset drops no chunk", "OffloadScheduler.reset", "self._index.clear()", "pass"),
    Mutation("copies in flight survive a reset", "Transfers.reset", "self._give_up(...)", "pass"),
    Mutation("swapped-out requests survive a reset", "OffloadScheduler.reset", "self._swap.reset()", "pass"),
    Mutation("KV from before a reset is saved after it", "RequestState.start_over", "self.can_save = False", "pass"),
    Mutation("KV from before a reset is saved after a swap", "OffloadScheduler.preempt", "_.can_save = _", "pass"),
    # Lookups, pins, slots.
    Mutation("an unfinished chunk is found", "ChunkIndex.find", "unready and _", "False"),
    Mutation("a pinned chunk is evicted", "Evictor.evict_tail", "_ in pins or ...", "..."),
    Mutation("a removed chunk frees its slot despite a pin", "ChunkIndex.invalidate", "_ in covered", "False"),
    Mutation(
        "a slot in quarantine is allocated",
        "SlotAllocator.release",
        """
        if _ not in self._quarantined:
            ...
        """,
        "...",
    ),
    Mutation("a match does not pin", "LoadPlanner._hold", "self._index.pin(...)", ""),
    Mutation(
        "a request is promised its last token",
        "LoadPlanner._num_loadable",
        "min(_1 * self._block_size, num_tokens - 1)",
        "min(_1 * self._block_size, num_tokens)",
    ),
    Mutation(
        "a load that begins inside a chunk reads its first blocks",
        "LoadPlanner._parts",
        "_ % self._blocks_per_chunk",
        "0",
    ),
    Mutation(
        "the untaken rest of a promise stays reserved",
        "Completion.release_rest",
        "_.num_staging_blocks - _",
        "0",
    ),
    Mutation(
        "saves ignore reserved staging blocks",
        "Staging.room_for_saves",
        "self.buffer.num_free",
        "self.buffer.num_blocks",
    ),
    Mutation(
        "the chunks of an abandoned load stay pinned",
        "LoadQueue.remove",
        "self._release(...)",
        """
        load.held.are_pinned = False
        _0
        """,
    ),
    Mutation("a waiting load is never abandoned", "LoadQueue.overdue", "now_s >= _.waits_until_s or ...", "False"),
    Mutation(
        "an abandoned load keeps its staging blocks",
        "LoadQueue.remove",
        "self._release(...)",
        """
        load.held.num_staging_blocks = 0
        _0
        """,
    ),
    # Saves.
    Mutation(
        "what an aborted step was to compute stays on offer", "SavePlanner.abort_step", "self.clear_offer(...)", ""
    ),
    Mutation("a save of an aborted step is published", "Transfers.abort_step", "job.job_id in job_ids", "False"),
    Mutation(
        "a save that was planned after an aborted step is published",
        "Transfers.abort_step",
        "job.job_id >= plan.next_job_id",
        "False",
    ),
    Mutation(
        "a request that was swapped out after an aborted step returns",
        "OffloadScheduler.abort_step",
        "self._swap.abort_step(plan)",
        "pass",
    ),
    Mutation(
        "the sampled token counts as computed",
        "SaveBySightings.num_tokens_to_save",
        "min(_1, num_computed_tokens)",
        "min(_1, num_computed_tokens + 1)",
    ),
    Mutation("a partial chunk is saved", "SavePlanner._read", "_1 // self._block_size", "-(-_1 // self._block_size)"),
    Mutation(
        "blocks are saved after their request was preempted",
        "OffloadScheduler._release_rest",
        "self._saves.clear_offer(...)",
        "",
    ),
    Mutation(
        "the wrong blocks are saved if a prefix has a hole",
        "SaveBatch._add_all",
        "[block_ids[i * size + j] for i in chunks for j in range(size)]",
        "[block_ids[(first + i) * size + j] for i in range(len(chunks)) for j in range(size)]",
    ),
    # Early saves.
    Mutation("early saves from before a reset are sent after it", "SavePlanner.reset", "self.early.clear()", ""),
    Mutation(
        "a preempted request saves KV from before a reset",
        "RequestState.copy_for_early_save",
        "saved.can_save = self.can_save",
        "saved.can_save = True",
    ),
    Mutation("a tail is saved without its head", "SavePlanner._plan_one", "_ < _.num_gone_chunks", "False"),
    Mutation(
        "a prefix without its head in HBM saves the wrong blocks",
        "EarlySaves.evict",
        "[-1] * _1 + _2",
        "_2 + [-1] * _1",
    ),
    Mutation(
        "a preempted request saves the block of its last, sampled token",
        "EarlySaves.preempt",
        "held.num_computed_tokens",
        "held.num_computed_tokens + 1",
    ),
    Mutation("early saves are copied after the step", "SavePlanner.plan", "JobKind.EARLY_SAVE", "JobKind.SAVE"),
    Mutation(
        "blocks of a timed-out swap are free immediately",
        "Completion.release",
        "not (late_account and ...)",
        "True",
    ),
    Mutation(
        "blocks of the swap pool are free while they are written", "SwapJobs.plan", "self._pool.hold(...)", "pass"
    ),
    Mutation(
        "a request runs before its swap-in has finished",
        "RequestSwap._finish_swap_in",
        "_1 or _.job is not None or _2",
        "_1 or _2",
    ),
    Mutation(
        "a request runs before its swap-out is known to have succeeded",
        "RequestSwap._finish_swap_in",
        "... or _.writers",
        "...",
    ),
    Mutation(
        "chunks of a swapped request in the host tier are not pinned",
        "RequestSwap._start_swap_out",
        "self._index.pin(...)",
        "pass",
    ),
    Mutation(
        "blocks are swapped in from the wrong positions",
        "SwappedRequest.copies_back",
        "pool_blocks[0][_1]",
        "pool_blocks[0][_1 // 2]",
    ),
    Mutation(
        "a failed swap-out counts as finished",
        "RequestSwap._copy_out_ended",
        """
        if failed:
            self._mark_lost(_)
        elif _1:
            ...
        """,
        """
        if _1:
            ...
        """,
    ),
    Mutation(
        "lost memory of the swap pool is ignored",
        "RequestSwap.mark_blocks_lost",
        """
        if _:
            self._mark_lost(_)
        """,
        "pass",
    ),
    Mutation(
        "an aborted request keeps its blocks in the swap pool",
        "RequestSwap.forget",
        "self._release(_)",
        """
        swapped.held.pool_blocks = ()
        _0
        """,
    ),
    Mutation(
        "a free block of the swap pool is found by its hash",
        "SwapPool.release",
        """
        if _:
            self.clear_hashes(_)
        """,
        "",
    ),
    # Probes, and earlier failures.
    Mutation("a request is promised a chunk that failed for it", "LoadPlanner.match", "had_failed_load", "False"),
    Mutation(
        "the failed chunks of a load that begins inside a chunk are off by its offset",
        "Transfers._slot_of_each_block",
        "_1.slots_of(_2)",
        "_1.slots_of([place - _2[0] % _1.slot_blocks for place in _2])",
    ),
    Mutation(
        "the probe of a released promise is not withdrawn",
        "LoadPlanner.release",
        "self._completion.release(...)",
        """
        promise.held.probe = None
        _0
        """,
    ),
    Mutation(
        "a breaker whose probe is withdrawn waits for another",
        "CircuitBreaker.cancel_probe",
        "self._state, self._probe = BreakerState.OPEN, None",
        "self._probe = None",
    ),
    Mutation(
        "a load in portions has the time of one",
        "LoadQueue._plan_job",
        "self._timeout_s * num_portions",
        "self._timeout_s",
    ),
    Mutation("a load loses the probe of its promise", "JobTable.plan", "held.breaker.hand_over(...)", "pass"),
    Mutation(
        "blocks from before a reset are found in the swap pool",
        "RequestSwap.reset",
        "self._pool.clear_hashes(...)",
        "pass",
    ),
    Mutation(
        "lost blocks of the swap pool are found", "RequestSwap.mark_blocks_lost", "self._pool.clear_hashes(...)", "pass"
    ),
    Mutation(
        "the probe of an ended request is not withdrawn",
        "RequestSwap.forget",
        "self._release(_)",
        """
        swapped.held.probe = None
        _0
        """,
    ),
    Mutation(
        "the probe of a lost request is not withdrawn",
        "RequestSwap._mark_lost",
        "self._release(_)",
        """
        swapped.held.probe = None
        _0
        """,
    ),
    Mutation(
        "the probe of a job that is dropped or cancelled is not withdrawn",
        "Completion.complete",
        "self.release(...)",
        """
        job.held.probe = None
        _0
        """,
    ),
    # Lost caches, and plans in flight.
    Mutation(
        "lost caches only change the plans",
        "ReportHandler._handle_cache_loss",
        "self._transfers.mark_caches_lost(swapped_out=_)",
        "",
    ),
    Mutation(
        "plans do not name the caches that they were made for",
        "OffloadScheduler.plan_step",
        "StepPlan(..., cache_epochs=_)",
        "StepPlan(...)",
    ),
    Mutation(
        "lost caches are not reported to the engine",
        "ReportHandler._handle_cache_loss",
        "self._lost_caches.append(...)",
        "",
    ),
    Mutation(
        "a restarted worker is assumed to have its old caches",
        "ReportHandler._check_incarnation",
        "self._handle_cache_loss(report)",
        "self._workers.set_epoch(CacheEpoch(worker_id=report.worker_id, incarnation=report.incarnation, num_losses=0))",
    ),
    Mutation(
        "a swap-out planned before the loss of the caches was known counts",
        "RequestSwap.mark_caches_lost",
        "_.mark_failed(...)",
        "pass",
    ),
    Mutation(
        "a cancellation is sent once",
        "Transfers.plan",
        "return tuple(self._to_cancel)",
        """
        cancelled, self._to_cancel = tuple(self._to_cancel), {}
        return cancelled
        """,
    ),
    # Windows and states.
    Mutation(
        "a window is loaded into the blocks of the layer group before it",
        "LoadPlanner._checkpoint_parts",
        "tables[group.group_id]",
        "tables[group.group_id - group.is_staged]",
    ),
    Mutation(
        "a window is saved from the blocks of the layer group before it",
        "CheckpointSaves._read",
        "self._checked(request, scheduled, group.group_id, end)",
        "self._checked(request, scheduled, group.group_id - group.is_staged, end)",
    ),
    Mutation(
        "the windows of two layer groups have one name",
        "CheckpointTable.begin",
        "piece_key(keys[number], group)",
        "piece_key(keys[number], 0)",
    ),
    Mutation(
        "a load lacks the first block of a window",
        "SlidingWindow.first_loaded",
        "end - self._window_blocks",
        "end - self._window_blocks + 1",
    ),
    Mutation(
        "a load copies a block before a window",
        "SlidingWindow.first_loaded",
        "end - self._window_blocks",
        "end - self._window_blocks - 1",
    ),
    Mutation(
        "a checkpoint lacks the first chunk of a window",
        "_window_chunks",
        "-(-layout.window_blocks(group) // size)",
        "layout.window_blocks(group) // size",
    ),
    Mutation(
        "a checkpoint has a chunk before a window",
        "_window_chunks",
        "-(-layout.window_blocks(group) // size)",
        "_0 + 1",
    ),
    Mutation(
        "a window is loaded from the slots of the boundary before",
        "LoadPlanner._checkpoint_parts",
        "num_pieces * group.slot_blocks - len(block_ids)",
        "_0 + (group.slot_blocks if group.is_staged else 0)",
    ),
    Mutation(
        "a checkpoint shares slots one chunk off",
        "CheckpointTable._known_slots",
        "before.slots[first + num_before + 1 - num:first + num_before]",
        "before.slots[first + num_before - num:first + num_before - 1]",
    ),
    Mutation(
        "a window that has been passed is saved",
        "CheckpointSaves._read",
        "self._null_block in _",
        "_0 and not group.is_staged",
    ),
    Mutation(
        "a checkpoint of a prompt comes after its last token",
        "CheckpointSaves.read",
        "scheduled.num_prompt_tokens - 1",
        "scheduled.num_prompt_tokens",
    ),
    Mutation(
        "where prompts part, nothing is saved",
        "LoadPlanner._last_checkpoint",
        "most if most > boundary else 0",
        "0",
    ),
    Mutation(
        "a request is promised all of its tokens with a checkpoint",
        "LoadPlanner._last_checkpoint",
        "num_tokens - 1",
        "num_tokens",
    ),
    Mutation(
        "a checkpoint that is being saved is found",
        "CheckpointTable._find_saved",
        """
        if checkpoint is not None and not _.num_pending:
            return checkpoint, boundary, pending_at
        """,
        """
        if checkpoint is not None:
            return checkpoint, boundary, pending_at
        """,
    ),
    Mutation(
        "the last checkpoint is found while it is being saved",
        "CheckpointTable.find",
        """
        if checkpoint is not None and self._is_ready(_):
            return checkpoint, end, False
        """,
        """
        if checkpoint is not None:
            return checkpoint, end, False
        """,
    ),
    Mutation(
        "the last checkpoint is found a chunk before its boundary",
        "CheckpointTable.find",
        "self._table.get(keys[end - 1])",
        "self._table.get(keys[min(end, len(keys) - 1)])",
    ),
    Mutation(
        "a checkpoint is found a chunk before its boundary",
        "CheckpointTable._find_saved",
        "table.get(keys[boundary - 1])",
        "table.get(keys[min(boundary, len(keys) - 1)])",
    ),
    Mutation(
        "a boundary is found while pieces of it are being saved",
        "PieceTable._first_missing",
        "slot in pending",
        "False",
    ),
    Mutation(
        "a boundary is found that lacks the first chunk of a window",
        "PieceTable.last_covered",
        "boundary - self._most_pieces[group]",
        "_0 + 1",
    ),
    Mutation("a boundary of shared pieces is skipped", "PieceTable._skip", "boundary -= 1", "boundary -= 2"),
    Mutation(
        "a boundary of shared pieces is not found",
        "CheckpointTable.find",
        "self._pieces.may_cover",
        "False",
    ),
    Mutation(
        "a promise does not hold the shared pieces that it found",
        "CheckpointTable.hold",
        "self._pieces.ref(checkpoint.slots)",
        "pass",
    ),
    Mutation("a saved piece is no event", "PieceTable.saved", "self._note(current, found=True)", "pass"),
    Mutation(
        "a piece is an event before every worker has it",
        "PieceTable.add",
        "self._num_refs[slot] = 2",
        """
        self._num_refs[slot] = 2
        self._note([name], found=True)
        """,
    ),
    Mutation(
        "a piece that nothing needs any more is no event",
        "PieceTable.unref",
        "self._note(removed, found=False)",
        "pass",
    ),
    Mutation("a lost piece is no event", "PieceTable.lose", "self._note(...)", "pass"),
    Mutation("a lost piece is removed twice by the events", "PieceTable.unref", "slot not in self._lost", "True"),
    Mutation("a piece of which a copy failed is removed by the events", "PieceTable.saved", "success", "not success"),
    Mutation("a window chunk that is being saved has one reference", "PieceTable.add", "2", "1"),
    Mutation(
        "a shared window chunk has no reference more", "CheckpointTable.begin", "self._pieces.ref(shared)", "pass"
    ),
    Mutation(
        "a dropped checkpoint that a load has read keeps its slots",
        "CheckpointTable.release",
        "self._pieces.unref(...)",
        "pass",
    ),
    Mutation("the slots of a held checkpoint are free", "CheckpointTable._unref", "not _.num_holds", "True"),
    Mutation(
        "a promise does not hold its checkpoint", "LoadPlanner._hold", "self._index.checkpoints.hold(...)", "pass"
    ),
    Mutation(
        "a released promise holds its checkpoint",
        "LoadPlanner.release",
        "self._completion.release(...)",
        """
        promise.held.checkpoint = None
        _0
        """,
    ),
    Mutation(
        "an abandoned load holds its checkpoint",
        "LoadQueue.remove",
        "self._release(...)",
        """
        load.held.checkpoint = None
        _0
        """,
    ),
    Mutation(
        "a load that has ended holds its checkpoint",
        "Completion.release",
        "self._index.checkpoints.release(...)",
        "pass",
    ),
    Mutation("a checkpoint with a failed piece is kept", "CheckpointTable.complete", "self.drop(_)", "pass"),
    Mutation(
        "the failed pieces of a partly failed save are published",
        "PieceWrites.remove",
        "self._checkpoints.complete(_1, success=False, quarantine=quarantine)",
        "self._checkpoints.complete(_1, success=True)",
    ),
    Mutation(
        "a failed state is taken for a chunk",
        "TierGroup.slots_of",
        "self.first_slot + _1",
        "_1",
    ),
    Mutation("lost pieces are found", "ChunkIndex.invalidate_slots", "self.checkpoints.lose(...)", "pass"),
    Mutation(
        "a piece that a load could not read is found again",
        "Transfers.ended",
        "self._lose_pieces(...)",
        "pass",
    ),
    Mutation(
        "a load whose checkpoint was lost counts as finished",
        "Holdings.touches",
        "_1 or ...",
        "_1",
    ),
    Mutation(
        "a part of a checkpoint is used",
        "Transfers._resume_request",
        "job.all_failed or _ is not None",
        "job.all_failed",
    ),
    Mutation(
        "a checkpoint of generated tokens is never superseded",
        "CheckpointSaves._begin",
        "self._index.checkpoints.supersede(...)",
        "pass",
    ),
    Mutation("the checkpoint of a prompt is superseded", "CheckpointSaves.read", "b in rolling", "True"),
    Mutation(
        "a checkpoint is superseded by one that is being saved",
        "CheckpointTable._drop_superseded",
        "by.num_pending",
        "False",
    ),
    Mutation(
        "a checkpoint that was loaded is superseded",
        "CheckpointTable._drop_superseded",
        "not (one.was_loaded or ...)",
        "True",
    ),
    Mutation("a checkpoint outlives the chunk before it", "ChunkIndex._remove", "self.checkpoints.drop(_)", "pass"),
    Mutation(
        "a checkpoint outlives the chunk before it when that is evicted",
        "CheckpointTable.evict_at",
        "self._evict(_, keeps_memory=_)",
        "pass",
    ),
    Mutation(
        "a checkpoint evicts its own prefix",
        "ChunkIndex.begin_checkpoint",
        "(keys[end - 1],)",
        "()",
    ),
    Mutation(
        "a checkpoint is saved a step too late",
        "CheckpointSaves.plan",
        "collected, self._tails = self._tails, {}",
        "collected, self._tails, self._later = getattr(self, '_later', {}), {}, self._tails",
    ),
    Mutation(
        "a checkpoint with KV from before a reset is saved",
        "CheckpointSaves._begin",
        "not request.can_save",
        "False",
    ),
    Mutation(
        "checkpoints from before a reset are saved after it", "SavePlanner.reset", "self._checkpoints.clear()", "pass"
    ),
    Mutation(
        "the state of the block before is saved",
        "CheckpointSaves._read",
        "read_ids(_1, _2, _3, end)",
        "_0 if group.is_staged else read_ids(_1, _2, max(0, end - 2), max(1, end - 1))",
    ),
    Mutation(
        "a state is loaded into the row of the block before",
        "LoadPlanner._checkpoint_parts",
        "self._read_held(_1, _2, _3, first, end_block)",
        "_0 if group.is_staged else self._read_held(_1, _2, _3, max(0, end_block - 2), max(1, end_block - 1))",
    ),
    Mutation(
        "the first state is loaded, whose ever it is",
        "LoadPlanner._checkpoint_parts",
        "checkpoint.slots[first_slot:end_slot]",
        "_0 if group.is_staged else (group.first_slot,)",
    ),
    Mutation(
        "a boundary without a state is saved",
        "CheckpointSaves._read",
        "self._null_block in _",
        "_0 and group.is_staged",
    ),
    Mutation(
        "a load that waited has staging blocks for its state",
        "LoadQueue.start",
        "_1.num_staged_blocks",
        "_1.num_blocks",
    ),
    Mutation(
        "a load has no time for its state",
        "LoadQueue._plan_job",
        "1 + self._num_unstaged_groups",
        "1",
    ),
    # Moves of memory between chunks and states.
    Mutation(
        "chunks are saved to slots that are being vacated",
        "SegmentMoves._begin",
        "self._index.shrink(...)",
        "pool and self._index.shrink(pool, num_slots)",
    ),
    Mutation(
        "states are saved to slots that are being vacated",
        "SegmentMoves._begin",
        "self._index.shrink(...)",
        "pool or self._index.shrink(pool, num_slots)",
    ),
    Mutation("memory moves before its slots are vacated", "SegmentMoves._vacate", "all(...)", "True"),
    Mutation("memory of states moves when no chunk uses it", "SegmentMoves._vacate", "all(...)", "is_vacated[0]"),
    Mutation("memory of chunks moves when no state uses it", "SegmentMoves._vacate", "all(...)", "is_vacated[1]"),
    Mutation(
        "pinned chunks are evicted when their memory moves",
        "Vacating.evict_chunks",
        "_1 in self._states.pins or _2",
        "_2",
    ),
    Mutation(
        "chunks that are being saved are evicted when their memory moves",
        "Vacating.evict_chunks",
        "_1 or slot in self._states.unready",
        "_1",
    ),
    Mutation(
        "memory moves that a late copy may write",
        "SlotAllocator.held_from",
        "_1 < _2",
        "_1 + self.num_quarantined < _2",
    ),
    Mutation(
        "reports from before a move count as after it",
        "SegmentMoves.accepts",
        "report.division_id == self._id",
        "True",
    ),
    Mutation(
        "slots of before a move count as there after it",
        "SegmentMoves._change",
        "self._known[_] = self.within_limits(_)",
        "pass",
    ),
    Mutation(
        "segments that a worker is about to free count as there",
        "HostPools.apply",
        "self._moves.within_limits(_1)",
        "_1",
    ),
    Mutation("all divisions have one id", "SegmentMoves._change", "self._id += 1", "self._id = 1"),
    Mutation(
        "the pools have more memory than a worker", "SegmentMoves._consider", "min(...)", "max(self._capacity.values())"
    ),
    Mutation(
        "memory that a restarted worker has again is not used",
        "SegmentMoves._consider",
        "sum(_1) != _2",
        "sum(_1) > _2",
    ),
    Mutation(
        "while slots are vacated they grow again",
        "SegmentMoves.num_slots",
        "self._num_slots_in(...)",
        "self._num_slots_in(self.limits)",
    ),
    Mutation("the last use of a lost chunk is kept", "ChunkIndex._remove", "self._ages.removed(...)", "pass"),
)


@functools.cache
def _homes(root: Path) -> Mapping[str, Sequence[Path]]:
    """The files that each function is in, by its qualified name."""
    homes: dict[str, list[Path]] = {}
    for file in sorted((root / _CORE).rglob("*.py")):
        for name, _ in functions(ast.parse(file.read_text())):
            homes.setdefault(name, []).append(file.relative_to(root))
    return homes


@functools.cache
def apply(mutation: Mutation, *, root: Path = ROOT) -> Mutant:
    """The module with the bug.

    Raises:
      ValueError: the function, or the place in it, does not exist or is ambiguous; one line, with the nearest ones.
    """
    try:
        path = _home(mutation.function, root)
        tree = ast.parse((root / path).read_text())
        (function,) = [function for name, function in functions(tree) if name == mutation.function]
        before = _signature(function)
        try:
            replace(function, mutation.find, mutation.new)
            if _signature(function) != before:
                raise PatternError("the place is in the signature; expected one in the body")
        except PatternError as e:
            raise ValueError(f"{mutation.function} ({path}:{function.lineno}): {e}") from e
    except ValueError as e:
        raise ValueError(f"mutation {mutation.name!r}: {e}") from e
    return Mutant(".".join(path.with_suffix("").parts), path, ast.unparse(ast.fix_missing_locations(tree)) + "\n")


@functools.cache
def unchanged(path: Path) -> str:
    """The source of a file, in the form in which mutants have it."""
    return ast.unparse(ast.parse((ROOT / path).read_text())) + "\n"


def _signature(function: Function) -> str:
    """All but the body."""
    return "".join(map(ast.dump, [function.args, *function.decorator_list]))


def _home(name: str, root: Path) -> Path:
    """The file of a function."""
    homes = _homes(root).get(name, [])
    if not homes:
        nearest = difflib.get_close_matches(name, _homes(root), n=3, cutoff=0.0)
        raise ValueError(f"{name} is not a function in {_CORE}; nearest: {', '.join(nearest)}")
    if len(homes) > 1:
        raise ValueError(f"{name} is a function {len(homes)} times, in {', '.join(map(str, homes))}")
    return homes[0]


@contextlib.contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The library of this process has the bug meanwhile: the function's code is exchanged."""
    mutant = apply(mutation)
    function, name = _function(importlib.import_module(mutant.module), mutation.function)
    before = function.__code__
    function.__code__ = _code(compile(mutant.source, str(ROOT / mutant.path), "exec"), name)
    try:
        yield
    finally:
        function.__code__ = before


def _function(module: types.ModuleType, name: str) -> tuple[types.FunctionType, str]:
    """A function of a module and its qualified name; of a function in another one, the outer one."""
    found: Any = module
    names = name.split(".")
    for i, part in enumerate(names):
        found = vars(found)[part]
        if not isinstance(found, type):
            return _unwrapped(found), ".".join(names[: i + 1])
    raise AssertionError(f"{name} is a class")


def _unwrapped(found: Any) -> types.FunctionType:
    """What a property, a class method, a cached function and the like call."""
    while not isinstance(found, types.FunctionType) or hasattr(found, "__wrapped__"):
        inner = (getattr(found, attribute, None) for attribute in ("__wrapped__", "fget", "func"))
        found = next(function for function in inner if function is not None)
    return found


def _code(outer: types.CodeType, name: str) -> types.CodeType:
    """The code of a function of a module."""
    codes = [constant for constant in outer.co_consts if isinstance(constant, types.CodeType)]
    (found,) = [code for code in codes if name == code.co_qualname or name.startswith(f"{code.co_qualname}.")]
    return found if name == found.co_qualname else _code(found, name)


def _hunt(mutation: Mutation, seeds: Iterable[int], num_steps: int) -> dict[str, Any]:
    """Runs seeds until one finds the bug; runs in a child."""
    from tests.simulation.campaign import run_seeds

    with planted(mutation):
        for seed in seeds:
            violations = run_seeds([seed], num_steps).violations
            if violations:
                return {"seed": seed, "violation": violations[seed]}
    return {"seed": -1, "violation": ""}


def in_child(hunt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the hunt for a bug has found, in a forked process that the bug may make hang or crash."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_TIMEOUT_S)  # kills a child whose bug makes it hang
        try:
            found = hunt()
        except Exception as e:
            found = {"violation": "", "error": f"{type(e).__name__}: {e}"}
        os.write(write_end, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"violation": "", "error": "it hung or crashed"}


def caught() -> dict[str, int]:
    """By name of a bug, the seed that found it before."""
    return json.loads(_CAUGHT.read_text()) if _CAUGHT.exists() else {}


def run_all(num_seeds: int, num_steps: int, *, only: str = "") -> Iterator[dict[str, Any]]:
    """Runs each bug: on the seed that found it before, then on the first `num_seeds`."""
    import tests.simulation.campaign  # noqa: F401  (once, for all children)

    gc.freeze()
    known = caught()
    _homes(ROOT)  # for all children

    for mutation in MUTATIONS:
        if only in mutation.name:
            seeds = ([known[mutation.name]] if mutation.name in known else []) + list(range(num_seeds))
            yield {"name": mutation.name, **in_child(functools.partial(_hunt, mutation, seeds, num_steps))}


def record(found: Iterable[dict[str, Any]]) -> None:
    """Records which seeds found the bugs."""
    seeds = caught() | {line["name"]: line["seed"] for line in found if line["violation"]}
    kept = {mutation.name: seeds[mutation.name] for mutation in MUTATIONS if mutation.name in seeds}
    _CAUGHT.write_text(json.dumps(kept, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="maximum number of seeds for each")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="only mutations whose name contains this")
    parser.add_argument("--record", action="store_true", help="record the seeds that found them in caught.json")
    args = parser.parse_args()
    for found in run_all(args.seeds, args.steps, only=args.only):
        print(json.dumps(found), flush=True)
        if args.record:
            record([found])


if __name__ == "__main__":
    main()
