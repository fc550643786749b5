"""Deliberate bugs in the library, and a way to run the simulation with one of them in place.

Each is a piece of syntax in one function of `tpu_offload/core`, named by its qualified name whatever module it is in,
and what stands there instead (`tests.simulation.patterns` says how the two are written). One that does not match
exactly one place is an error.

No file is changed: a child process imports the library through a finder that replaces one module's source.
`python -m tests.simulation.mutations` imports jax once, forks a child for each mutation and prints, a line of JSON
each, what the simulation found.

A search takes minutes, and for the rarest bugs a thousand lives, so the tests begin with the seeds in `caught.json`,
which found each bug before. `--record` searches for those that are not found by theirs and writes the file anew; that
is to be done when the simulation or the library has changed so much that lives take other courses.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import gc
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.simulation.patterns import PatternError, functions, replace

ROOT = Path(__file__).resolve().parents[2]
_CORE = Path("tpu_offload", "core")
_CAUGHT = Path(__file__).with_name("caught.json")
_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A bug.

    Attributes:
      name: what it does.
      function: qualified name of a function in `tpu_offload/core`.
      find: pattern of what is there once.
      new: what stands there instead.
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
      source: what is run instead of the file.
    """

    module: str
    path: Path
    source: str


MUTATIONS = (
    # Ends of jobs.
    Mutation(
        "a load that failed keeps its staging blocks",
        "Completion.complete",
        "self._staging.release(...)",
        """
        if job.state is not JobState.FAILED or job.kind.writes_host:
            _0
        """,
    ),
    Mutation(
        "staging blocks of a cancelled load are released twice",
        "Completion.complete",
        "self._staging.release(...)",
        """
        _0
        if job.state is JobState.CANCELLED:
            _0
        """,
    ),
    Mutation(
        "the unpin is skipped when a load fails",
        "Completion.complete",
        "self._index.unpin(...)",
        """
        if job.state is not JobState.FAILED:
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
        "a load that was not sent yet is sent after its request is gone",
        "LoadQueue.remove",
        "self._waiting.remove(...)",
        "pass",
    ),
    Mutation("a failed save is published", "Transfers._bad_chunks", "return list(range(_))", "return []"),
    Mutation(
        "the bad chunks of a save that failed in part are published",
        "Transfers._bad_chunks",
        "return sorted(_)",
        "return []",
    ),
    Mutation("a load that failed in part is used up to the last hole", "Transfers._tell_of", "min(_1)", "max(_1)"),
    Mutation(
        "a failed load is taken for a good one",
        "Transfers._tell_of",
        "_1.state is JobState.FINISHED",
        "_1.state is not JobState.TIMED_OUT",
    ),
    Mutation(
        "old news is told to the next request of the same name",
        "Transfers.forget_news",
        "[_1 for _1 in _2 if _]",
        "[_1 for _1 in _2]",
    ),
    Mutation(
        "the slots of a late save are free at once", "Transfers._end_save", "_.state is JobState.TIMED_OUT", "False"
    ),
    Mutation(
        "the memory of a chunk is lost under a load and nobody minds",
        "Transfers._fail_in",
        "_.failed_blocks.update(...)",
        "pass",
    ),
    # What workers say.
    Mutation("one worker's word is enough", "JobTable.report", "not job.waiting_for", "True"),
    Mutation(
        "a duplicate counts for another worker",
        "Job.take",
        "self.waiting_for.remove(_)",
        "self.waiting_for.pop()",
    ),
    Mutation("a result is expected twice", "JobTable.report", "... or worker_id not in _.waiting_for", "..."),
    Mutation(
        "a slot leaves quarantine when the first worker has spoken",
        "JobTable._report_late",
        "not job.waiting_for",
        "True",
    ),
    Mutation("a job whose result was lost is taken for finished", "JobTable.ack_through", "_.doom(...)", ""),
    Mutation(
        "the oldest job of a worker is taken for over", "JobTable.ack_through", "_1.job_id < _2", "_1.job_id <= _2"
    ),
    Mutation("a late save is forgotten", "JobTable.expire", "self._late[_] = _", "pass"),
    Mutation(
        "jobs time out a job too early", "JobTable.expire", "_1.deadline_s <= now_s", "_1.deadline_s <= now_s + 5.0"
    ),
    Mutation("jobs never time out", "JobTable.expire", "... and _.deadline_s <= now_s", "False"),
    Mutation(
        "a former life of a worker is listened to",
        "Reports._is_of_an_earlier_life",
        "... or report.incarnation >= _",
        "True",
    ),
    Mutation(
        "nobody notices that a worker was started anew",
        "Reports._note_life",
        """
        if known:
            ...
        else:
            self._workers.set_epoch(_1)
        """,
        """
        if True:
            self._workers.set_epoch(_1)
        """,
    ),
    Mutation(
        "the slots that a new life of a worker lacks are used", "Reports._start_anew", "self._index.limit(...)", "pass"
    ),
    Mutation(
        "what a worker was sent is over when it was started anew",
        "Reports._start_anew",
        "self._transfers.doubt(_1, ...)",
        "self._jobs.ack_through(_1, self._jobs.num_given, why='')",
    ),
    Mutation(
        "a slot is usable when the first worker has it",
        "Reports._take",
        "min(_1, *self._num_host_chunks.values())",
        "min(_1, max(self._num_host_chunks.values()))",
    ),
    Mutation("lost slots are passed over", "Reports._lose_slots", "self._transfers.lose_slots(...)", "pass"),
    # Reset.
    Mutation("a reset drops no chunk", "OffloadScheduler.reset", "self._index.clear()", "pass"),
    Mutation("copies in flight survive a reset", "Transfers.reset", "self._give_up(...)", "pass"),
    Mutation("what is swapped out survives a reset", "OffloadScheduler.reset", "self._swap.reset()", "pass"),
    Mutation("KV of before a reset is saved after it", "RequestState.start_over", "self.saving = False", "pass"),
    Mutation("KV of before a reset is saved after a swap", "OffloadScheduler.preempt", "_.saving = _", "pass"),
    # Lookups, pins, slots.
    Mutation("an unfinished chunk is found", "ChunkIndex.find", "self._unready and _", "False"),
    Mutation("a pinned chunk is evicted", "ChunkIndex.evict", "_ in pins or ...", "..."),
    Mutation("a chunk that goes gives up its slot under a pin", "ChunkIndex.drop", "_ in covered", "False"),
    Mutation(
        "a slot in quarantine is handed out",
        "ChunkIndex._remove",
        """
        if _ not in self._quarantined:
            ...
        """,
        "...",
    ),
    Mutation("a match does not pin", "LoadPlanner.match", "self._index.pin(...)", ""),
    Mutation(
        "a request is promised its last token",
        "LoadPlanner.match",
        "min(_1 * self._block_size, num_tokens - 1)",
        "min(_1 * self._block_size, num_tokens)",
    ),
    Mutation(
        "a load that begins inside a chunk reads its first blocks",
        "LoadPlanner.admit",
        "_ % self._blocks_per_chunk",
        "0",
    ),
    Mutation(
        "the engine takes less than it was promised and the rest stays reserved",
        "LoadPlanner.admit",
        "_.num_staging_blocks - _",
        "0",
    ),
    Mutation(
        "saves are planned as though nobody held staging blocks",
        "Staging.room_for_saves",
        "self._buffer.num_free",
        "self._buffer.num_blocks",
    ),
    Mutation(
        "the chunks of a load that was given up before it was sent stay pinned",
        "Transfers.detach",
        "self._index.unpin(...)",
        "",
    ),
    Mutation("a load that waits is never given up", "LoadQueue.impatient", "now_s >= _.waits_until_s or ...", "False"),
    Mutation(
        "a load that is given up before it was sent keeps its staging blocks",
        "LoadQueue.remove",
        "self._staging.release(...)",
        "",
    ),
    # Saves.
    Mutation(
        "the sampled token counts as computed",
        "SaveBySightings.num_tokens_to_save",
        "min(_1, num_computed_tokens)",
        "min(_1, num_computed_tokens + 1)",
    ),
    Mutation(
        "a chunk that is not full is saved", "SavePlanner.read", "_1 // self._block_size", "-(-_1 // self._block_size)"
    ),
    Mutation(
        "blocks are saved after their request was preempted",
        "OffloadScheduler._forget",
        "self._saves.withdraw(...)",
        "",
    ),
    Mutation(
        "the wrong blocks are saved where a prefix has a hole",
        "SavePlanner._plan_one",
        "[block_ids[i * size + j] for i in saved[:num_saved] for j in range(size)]",
        "[block_ids[(first + i) * size + j] for i in range(num_saved) for j in range(size)]",
    ),
    # Early saves.
    Mutation("what left its blocks before a reset is saved after it", "SavePlanner.reset", "self.leaving.clear()", ""),
    Mutation(
        "a preempted request saves KV of before a reset",
        "LeavingBlocks.preempt",
        "leaving.promise = leaving.load = leaving.revoked = None",
        """
        _0
        leaving.saving = True
        """,
    ),
    Mutation("a tail is saved whose head is nowhere", "SavePlanner._plan_one", "_ < _.num_gone_chunks", "False"),
    Mutation(
        "a prefix without its head in HBM saves the wrong blocks",
        "LeavingBlocks.evict",
        "[-1] * _1 + _2",
        "_2 + [-1] * _1",
    ),
    Mutation(
        "a preempted request saves the block of its last, sampled token",
        "LeavingBlocks.preempt",
        "held.num_computed_tokens",
        "held.num_computed_tokens + 1",
    ),
    Mutation(
        "what leaves its blocks is copied after the step", "SavePlanner.plan", "JobKind.EARLY_SAVE", "JobKind.SAVE"
    ),
    Mutation(
        "blocks of a late swap are free at once",
        "Completion.complete",
        "not (timed_out and ...)",
        "True",
    ),
    Mutation("the pool's blocks are free while they are written", "PlannedSwaps.plan", "self._pool.hold(...)", "pass"),
    Mutation(
        "a request is back before its copy is", "RequestSwap._end_return", "_1 or _.job is not None or _2", "_1 or _2"
    ),
    Mutation(
        "a request is back before its copy out is known to be good",
        "RequestSwap._end_return",
        "... or _.writers",
        "...",
    ),
    Mutation(
        "what the tier has of a swapped request is not pinned", "RequestSwap.swap_out", "self._index.pin(...)", "pass"
    ),
    Mutation(
        "blocks are brought back from the wrong places",
        "RequestSwap.swap_in",
        "_1.pool_blocks[0][_2]",
        "_1.pool_blocks[0][_2 // 2]",
    ),
    Mutation(
        "a failed copy out is taken for a good one",
        "RequestSwap._end_out",
        """
        if failed:
            self._lose(_)
        elif _1:
            ...
        """,
        """
        if _1:
            ...
        """,
    ),
    Mutation(
        "lost memory of the swap pool is passed over",
        "RequestSwap.lose_blocks",
        """
        if _:
            self._lose(_)
        """,
        "pass",
    ),
    Mutation(
        "an aborted request leaves its blocks in the swap pool", "RequestSwap.forget", "self._jobs.release(_)", ""
    ),
    Mutation(
        "a block of the swap pool is known by its contents after it is free",
        "SwapPool.release",
        """
        if _:
            self.forget(_)
        """,
        "",
    ),
    # Probes, and what failed before.
    Mutation("a request is promised again what failed for it", "LoadPlanner.match", "had_failed_load", "False"),
    Mutation(
        "the chunks of a load that begins inside one are counted from its first block",
        "Transfers._chunk_of",
        "_ % self._blocks_per_chunk + _1",
        "_1",
    ),
    Mutation(
        "a probe that was promised is not withdrawn", "LoadPlanner.release", "self._breaker.withdraw(...)", "pass"
    ),
    Mutation("a load is no probe when its promise was", "LoadQueue._send", "self._breaker.hand_over(...)", ""),
    Mutation(
        "blocks of before a reset are found in the swap pool", "RequestSwap.reset", "self._pool.forget(...)", "pass"
    ),
    Mutation("lost blocks of the swap pool are found", "RequestSwap.lose_blocks", "self._pool.forget(...)", "pass"),
    Mutation(
        "the probe of an ended request is not withdrawn",
        "RequestSwap.forget",
        "self._breakers[_].withdraw(...)",
        "pass",
    ),
    Mutation(
        "the probe of a lost request is not withdrawn", "RequestSwap._lose", "self._breakers[_].withdraw(...)", ""
    ),
    Mutation(
        "the probe of a job that is dropped or cancelled is not withdrawn",
        "Completion.complete",
        "job.breaker.withdraw(...)",
        "pass",
    ),
    # Lost caches, and plans on their way.
    Mutation(
        "a loss of the caches changes nothing but the plans",
        "Reports._lose_caches",
        "self._transfers.lose_caches()",
        "",
    ),
    Mutation(
        "plans do not say for which caches they were made",
        "OffloadScheduler.plan_step",
        "StepPlan(..., cache_epochs=_)",
        "StepPlan(...)",
    ),
    Mutation(
        "the engine does not hear that the caches are gone", "Reports._lose_caches", "self._lost_caches.append(...)", ""
    ),
    Mutation(
        "a worker that was started anew has its old caches",
        "Reports._note_life",
        "self._lose_caches(report)",
        "self._workers.set_epoch(CacheEpoch(worker_id=report.worker_id, incarnation=report.incarnation, num_losses=0))",
    ),
    Mutation(
        "a swap-out that was planned before the loss was heard of counts",
        "RequestSwap.lose_caches",
        "_.doom(...)",
        "pass",
    ),
    Mutation(
        "a cancel is said once",
        "Transfers.plan",
        "return tuple(self._to_cancel)",
        """
        cancelled, self._to_cancel = tuple(self._to_cancel), {}
        return cancelled
        """,
    ),
)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with other source."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(ROOT / mutant.path))
        self._source = mutant.source

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Finds the mutated module before anybody else does."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._mutant.module:
            return None
        loader = _Loader(self._mutant)
        return importlib.machinery.ModuleSpec(fullname, loader, origin=loader.path)


@functools.cache
def _homes(root: Path) -> Mapping[str, Sequence[Path]]:
    """The files that each function is in, by its qualified name."""
    homes: dict[str, list[Path]] = {}
    for file in sorted((root / _CORE).rglob("*.py")):
        for name, _ in functions(ast.parse(file.read_text())):
            homes.setdefault(name, []).append(file.relative_to(root))
    return homes


def apply(mutation: Mutation, *, root: Path = ROOT) -> Mutant:
    """The module with the bug.

    Raises:
      ValueError: the function, or the place in it, is not there, or more than once. One line says what is.
    """
    try:
        path = _home(mutation.function, root)
        tree = ast.parse((root / path).read_text())
        (function,) = [function for name, function in functions(tree) if name == mutation.function]
        try:
            replace(function, mutation.find, mutation.new)
        except PatternError as e:
            raise ValueError(f"{mutation.function} ({path}:{function.lineno}): {e}") from e
    except ValueError as e:
        raise ValueError(f"mutation {mutation.name!r}: {e}") from e
    return Mutant(".".join(path.with_suffix("").parts), path, ast.unparse(ast.fix_missing_locations(tree)) + "\n")


def _home(name: str, root: Path) -> Path:
    """The file of a function."""
    homes = _homes(root).get(name, [])
    if not homes:
        nearest = difflib.get_close_matches(name, _homes(root), n=3, cutoff=0.0)
        raise ValueError(f"{name} is no function in {_CORE}; nearest: {', '.join(nearest)}")
    if len(homes) > 1:
        raise ValueError(f"{name} is a function {len(homes)} times, in {', '.join(map(str, homes))}")
    return homes[0]


def _hunt(mutation: Mutation | None, seeds: Iterable[int], num_steps: int) -> dict[str, Any]:
    """In a child: runs seeds until one finds the bug."""
    if mutation is not None:
        sys.meta_path.insert(0, Finder(apply(mutation)))
    from tests.simulation.campaign import run_seeds

    for seed in seeds:
        violations = run_seeds(range(seed, seed + 1), num_steps).violations
        if violations:
            return {"seed": seed, "violation": violations[seed]}
    return {"seed": -1, "violation": ""}


def _in_child(mutation: Mutation | None, seeds: Iterable[int], num_steps: int) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_TIMEOUT_S)  # a bug that hangs ends its child
        try:
            found = _hunt(mutation, seeds, num_steps)
        except ValueError as e:
            found = {"seed": -1, "violation": "", "error": str(e)}
        os.write(write_end, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"seed": -1, "violation": "", "error": "it hung, or the interpreter died"}


def caught() -> dict[str, int]:
    """The seeds that found each bug before, by its name."""
    return json.loads(_CAUGHT.read_text()) if _CAUGHT.exists() else {}


def run_all(num_seeds: int, num_steps: int, *, only: str = "") -> Iterator[dict[str, Any]]:
    """What the simulation finds of each bug, by name: on the seed that found it before, else on one of the first."""
    # Before the first fork, because they take a second. No child must find the modules that its bug may be in.
    import tpu_offload.config
    import tpu_offload.metrics
    import tpu_offload.worker  # noqa: F401

    assert not any(name.startswith("tpu_offload.core") for name in sys.modules)
    gc.freeze()
    known = caught()
    _homes(ROOT)  # for all children

    for mutation in MUTATIONS:
        if only in mutation.name:
            seeds = ([known[mutation.name]] if mutation.name in known else []) + list(range(num_seeds))
            yield {"name": mutation.name, **_in_child(mutation, seeds, num_steps)}


def record(found: Iterable[dict[str, Any]]) -> None:
    """Writes down which seeds found the bugs."""
    seeds = caught() | {line["name"]: line["seed"] for line in found if line["violation"]}
    kept = {mutation.name: seeds[mutation.name] for mutation in MUTATIONS if mutation.name in seeds}
    _CAUGHT.write_text(json.dumps(kept, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="at most so many for each")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="those with this in their names")
    parser.add_argument("--record", action="store_true", help="write the seeds that found them to caught.json")
    args = parser.parse_args()
    for found in run_all(args.seeds, args.steps, only=args.only):
        print(json.dumps(found), flush=True)
        if args.record:
            record([found])


if __name__ == "__main__":
    main()
