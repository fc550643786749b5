"""Deliberate bugs in the library, and a way to run the simulation with one of them in place.

No file is changed: a child process imports the library through a finder that replaces one piece of one module's
source. `python -m tests.simulation.mutations` imports jax once, forks a child for each mutation and prints, a line of
JSON each, what the simulation found. A mutation whose text is not in its file exactly once is an error.

A search takes minutes, and for the rarest bugs a thousand lives, so the tests begin with the seeds in `caught.json`,
which found each bug before. `--record` searches for those that are not found by theirs and writes the file anew; that
is to be done when the simulation or the library has changed so much that lives take other courses.
"""

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_CAUGHT = Path(__file__).with_name("caught.json")
_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A bug.

    Attributes:
      name: what it does.
      path: the file below `tpu_offload/core/`, without `.py`.
      old: text of it, there once.
      new: what stands there instead.
    """

    name: str
    path: str
    old: str
    new: str


MUTATIONS = (
    # Ends of jobs.
    Mutation(
        "a load that failed keeps its staging blocks",
        "transfers",
        "        self._staging.release(job.account, job.transfer.num_staging_blocks, job.direction)\n",
        "        if job.state is not JobState.FAILED or job.direction is Direction.SAVE:\n"
        "            self._staging.release(job.account, job.transfer.num_staging_blocks, job.direction)\n",
    ),
    Mutation(
        "staging blocks of a cancelled load are released twice",
        "transfers",
        "        if job.direction is Direction.LOAD:\n            self._index.unpin(job.keys, sweep=False)\n",
        "        if job.direction is Direction.LOAD:\n            self._index.unpin(job.keys, sweep=False)\n"
        "        if job.state is JobState.CANCELLED:\n"
        "            self._staging.release(job.account, job.transfer.num_staging_blocks, job.direction)\n",
    ),
    Mutation(
        "the unpin is skipped when a load fails",
        "transfers",
        "        if job.direction is Direction.LOAD:\n            self._index.unpin(job.keys, sweep=False)\n",
        "        if job.direction is Direction.LOAD and job.state is not JobState.FAILED:\n"
        "            self._index.unpin(job.keys, sweep=False)\n",
    ),
    Mutation(
        "a late load is not cancelled on the workers",
        "transfers",
        "                self._to_cancel[job.job_id] = job.waiting_for\n            self._end(job)\n",
        "                pass\n            self._end(job)\n",
    ),
    Mutation(
        "the load of an aborted request is not cancelled on the workers",
        "transfers",
        "            self._to_cancel[load.job_id] = load.waiting_for\n",
        "            pass\n",
    ),
    Mutation(
        "a load that was not sent yet is sent after its request is gone",
        "load_queue",
        "        self._waiting.remove(load)\n",
        "        pass\n",
    ),
    Mutation(
        "a failed save is published",
        "transfers",
        "            return list(range(len(job.keys)))\n",
        "            return []\n",
    ),
    Mutation(
        "the bad chunks of a save that failed in part are published",
        "transfers",
        "        return sorted({self._chunk_of(job, position) for position in job.failed_blocks})\n",
        "        return []\n",
    ),
    Mutation(
        "a load that failed in part is used up to the last hole",
        "transfers",
        "        num_loaded = 0 if job.doomed else min(job.failed_blocks)\n",
        "        num_loaded = 0 if job.doomed else max(job.failed_blocks)\n",
    ),
    Mutation(
        "a failed load is taken for a good one",
        "transfers",
        "        if job.state is JobState.FINISHED:\n            self._loaded.append(job.request_id)\n",
        "        if job.state is not JobState.TIMED_OUT:\n            self._loaded.append(job.request_id)\n",
    ),
    Mutation(
        "old news is told to the next request of the same name",
        "transfers",
        "for failed in self._failed_loads if failed.request_id != request_id]",
        "for failed in self._failed_loads]",
    ),
    Mutation(
        "the slots of a late save are free at once",
        "transfers",
        "            quarantine = job.state is JobState.TIMED_OUT\n",
        "            quarantine = False\n",
    ),
    Mutation(
        "the memory of a chunk is lost under a load and nobody minds",
        "transfers",
        "                job.failed_blocks.update(i for i in range(job.num_parts) if self._chunk_of(job, i) in gone)\n",
        "                pass\n",
    ),
    # What workers say.
    Mutation(
        "one worker's word is enough",
        "jobs",
        "        return None if job.waiting_for else self.end(job)\n",
        "        return self.end(job)\n",
    ),
    Mutation(
        "a duplicate counts for another worker",
        "jobs",
        "        self.waiting_for.remove(worker_id)\n        self.duration_s",
        "        self.waiting_for.pop()\n        self.duration_s",
    ),
    Mutation(
        "a result is expected twice",
        "jobs",
        "job.state is JobState.SENT and worker_id in job.waiting_for\n",
        "job.state is JobState.SENT\n",
    ),
    Mutation(
        "a slot leaves quarantine when the first worker has spoken",
        "jobs",
        "        return None if job.waiting_for else self._late.pop(job_id)\n",
        "        return self._late.pop(job_id)\n",
    ),
    Mutation(
        "a job whose result was lost is taken for finished",
        "jobs",
        "            job.waiting_for.remove(worker_id)\n            job.doom(why)\n",
        "            job.waiting_for.remove(worker_id)\n",
    ),
    Mutation(
        "the oldest job of a worker is taken for over",
        "jobs",
        "takewhile(lambda j: j.job_id < oldest_job_id, self)",
        "takewhile(lambda j: j.job_id <= oldest_job_id, self)",
    ),
    Mutation(
        "a late save is forgotten",
        "jobs",
        "                self._late[job.job_id] = job\n",
        "                pass\n",
    ),
    Mutation(
        "jobs time out a job too early",
        "jobs",
        "if job.state is JobState.SENT and job.deadline_s <= now_s]\n",
        "if job.state is JobState.SENT and job.deadline_s <= now_s + 5.0]\n",
    ),
    Mutation(
        "jobs never time out",
        "jobs",
        "if job.state is JobState.SENT and job.deadline_s <= now_s]\n",
        "if False]\n",
    ),
    Mutation(
        "a former life of a worker is listened to",
        "reports",
        "        if not report.incarnation or report.incarnation >= known:\n",
        "        if True:\n",
    ),
    Mutation(
        "nobody notices that a worker was started anew",
        "reports",
        "        if known:\n            self._start_anew(report)\n            self._lose_caches(report)\n        else:",
        "        if True:",
    ),
    Mutation(
        "the slots that a new life of a worker lacks are used",
        "reports",
        "        self._index.limit(report.num_host_chunks)\n",
        "        pass\n",
    ),
    Mutation(
        "what a worker was sent is over when it was started anew",
        "reports",
        '        self._transfers.doubt(worker_id, why=f"worker {worker_id} was started anew")\n',
        "        self._pass_over(worker_id, self._job_ids.num_given)\n",
    ),
    Mutation(
        "a slot is usable when the first worker has it",
        "reports",
        "            self._index.grow(min(self._max_host_chunks, *self._num_host_chunks.values()))\n",
        "            self._index.grow(min(self._max_host_chunks, max(self._num_host_chunks.values())))\n",
    ),
    Mutation(
        "lost slots are passed over",
        "reports",
        "        self._transfers.lose_slots(first, end)\n",
        "        pass\n",
    ),
    # Reset.
    Mutation(
        "a reset drops no chunk",
        "scheduler",
        "        self._index.clear()\n",
        "        pass\n",
    ),
    Mutation(
        "copies in flight survive a reset",
        "transfers",
        '            self._give_up(job, "the cache was reset")\n',
        "            pass\n",
    ),
    Mutation(
        "what is swapped out survives a reset",
        "scheduler",
        "        self._swap.reset()\n",
        "        pass\n",
    ),
    Mutation(
        "KV of before a reset is saved after it",
        "tracking",
        "        self.saving = False\n",
        "        pass\n",
    ),
    Mutation(
        "KV of before a reset is saved after a swap",
        "scheduler",
        "            request.saving = former is None or former.saving\n",
        "            pass\n",
    ),
    # Lookups, pins, slots.
    Mutation(
        "an unfinished chunk is found",
        "index",
        "        if self._unready and not self._unready.isdisjoint(slots):\n",
        "        if False:\n",
    ),
    Mutation(
        "a pinned chunk is evicted",
        "index",
        "            if rest in pins or rest in protected or slot in unready or (num_gone and rest in stop):\n",
        "            if rest in protected or slot in unready or (num_gone and rest in stop):\n",
    ),
    Mutation(
        "a chunk that goes gives up its slot under a pin",
        "index",
        "            if slot in covered:\n",
        "            if False:\n",
    ),
    Mutation(
        "a slot in quarantine is handed out",
        "index",
        "        if slot not in self._quarantined:\n            self._set_free(slot)\n",
        "        self._set_free(slot)\n",
    ),
    Mutation(
        "a match does not pin",
        "loading",
        "        self._index.pin(keys)\n        self._breaker.begin(request.account)\n",
        "        self._breaker.begin(request.account)\n",
    ),
    Mutation(
        "a request is promised its last token",
        "loading",
        "        end_tokens = min((first_block + num_blocks) * self._block_size, num_tokens - 1)\n",
        "        end_tokens = min((first_block + num_blocks) * self._block_size, num_tokens)\n",
    ),
    Mutation(
        "a load that begins inside a chunk reads its first blocks",
        "loading",
        "                first=promise.first_block % self._blocks_per_chunk,\n",
        "                first=0,\n",
    ),
    Mutation(
        "the engine takes less than it was promised and the rest stays reserved",
        "loading",
        "promise.num_staging_blocks - num_staging_blocks, Direction.LOAD)\n",
        "0, Direction.LOAD)\n",
    ),
    Mutation(
        "saves are planned as though nobody held staging blocks",
        "staging",
        "is Direction.LOAD else self._buffer.num_free",
        "is Direction.LOAD else self._buffer.num_blocks",
    ),
    Mutation(
        "the chunks of a load that was given up before it was sent stay pinned",
        "transfers",
        "            self._index.unpin(load.keys)\n",
        "",
    ),
    Mutation(
        "a load that waits is never given up",
        "load_queue",
        "(now_s >= load.waits_until_s or not self._breaker.admits(load.account))\n",
        "False\n",
    ),
    Mutation(
        "a load that is given up before it was sent keeps its staging blocks",
        "load_queue",
        "        self._staging.release(load.account, load.num_staging_blocks, Direction.LOAD)\n",
        "",
    ),
    # Saves.
    Mutation(
        "the sampled token counts as computed",
        "save_policy",
        "        return min(num_prompt_tokens, num_computed_tokens)\n",
        "        return min(num_prompt_tokens, num_computed_tokens + 1)\n",
    ),
    Mutation(
        "a chunk that is not full is saved",
        "saving",
        "request.limits.num_savable_tokens(num_tokens) // self._block_size\n",
        "-(-request.limits.num_savable_tokens(num_tokens) // self._block_size)\n",
    ),
    Mutation(
        "blocks are saved after their request was preempted",
        "scheduler",
        "        self._saves.withdraw(request)\n        self._transfers.forget_news(request_id)\n",
        "        self._transfers.forget_news(request_id)\n",
    ),
    Mutation(
        "the wrong blocks are saved where a prefix has a hole",
        "saving",
        "[block_ids[i * size + j] for i in saved[:num_saved] for j in range(size)]",
        "[block_ids[(first + i) * size + j] for i in range(num_saved) for j in range(size)]",
    ),
    # Early saves.
    Mutation(
        "what left its blocks before a reset is saved after it",
        "saving",
        "        self.leaving.clear()\n        self._num_seen.clear()\n",
        "        self._num_seen.clear()\n",
    ),
    Mutation(
        "a preempted request saves KV of before a reset",
        "leaving",
        "        leaving.promise = leaving.load = leaving.revoked = None\n",
        "        leaving.promise = leaving.load = leaving.revoked = None\n        leaving.saving = True\n",
    ),
    Mutation(
        "a tail is saved whose head is nowhere",
        "saving",
        "        if first < request.num_gone_chunks:\n",
        "        if False:\n",
    ),
    Mutation(
        "a prefix without its head in HBM saves the wrong blocks",
        "leaving",
        "        request.block_ids = [-1] * num_gone_blocks + block_ids[::-1]\n",
        "        request.block_ids = block_ids[::-1] + [-1] * num_gone_blocks\n",
    ),
    Mutation(
        "a preempted request saves the block of its last, sampled token",
        "leaving",
        "        num_tokens = held.num_computed_tokens\n",
        "        num_tokens = held.num_computed_tokens + 1\n",
    ),
    Mutation(
        "what leaves its blocks is copied after the step",
        "scheduler",
        "            saves = self._saves.plan(deadline_s=now_s + self._config.job_timeout_s)\n",
        "            saves = self._saves.plan(deadline_s=now_s + self._config.job_timeout_s)\n"
        "            saves.jobs, saves.early = [*saves.early, *saves.jobs], []\n",
    ),
    # Request swap.
    Mutation(
        "blocks of a late swap are free at once",
        "swap/manager",
        "        if not (job.state is JobState.TIMED_OUT and job.direction is Direction.SAVE):\n",
        "        if True:\n",
    ),
    Mutation(
        "the pool's blocks are free while they are written",
        "swap/records",
        "        self._pool.hold(places)\n",
        "        pass\n",
    ),
    Mutation(
        "a request is back before its copy is",
        "swap/manager",
        "        if swapped.where is not Where.RETURNING or swapped.job is not None or swapped.writers:\n",
        "        if swapped.where is not Where.RETURNING or swapped.writers:\n",
    ),
    Mutation(
        "a request is back before its copy out is known to be good",
        "swap/manager",
        "        if swapped.where is not Where.RETURNING or swapped.job is not None or swapped.writers:\n",
        "        if swapped.where is not Where.RETURNING or swapped.job is not None:\n",
    ),
    Mutation(
        "what the tier has of a swapped request is not pinned",
        "swap/manager",
        "            self._index.pin(tier_keys)\n",
        "            pass\n",
    ),
    Mutation(
        "blocks are brought back from the wrong places",
        "swap/manager",
        "tuple(swapped.pool_blocks[0][i - num_tier] for i in from_pool)",
        "tuple(swapped.pool_blocks[0][(i - num_tier) // 2] for i in from_pool)",
    ),
    Mutation(
        "a failed copy out is taken for a good one",
        "swap/manager",
        "                if failed:\n                    self._lose(swapped)\n                elif self._end_return",
        "                if self._end_return",
    ),
    Mutation(
        "lost memory of the swap pool is passed over",
        "swap/manager",
        "            if not gone.isdisjoint(swapped.pool_blocks[group_id]):\n                self._lose(swapped)\n",
        "            pass\n",
    ),
    Mutation(
        "an aborted request leaves its blocks in the swap pool",
        "swap/manager",
        "            self._detach(swapped)\n            self._jobs.release(swapped)\n            self._breakers",
        "            self._detach(swapped)\n            self._breakers",
    ),
    Mutation(
        "a block of the swap pool is known by its contents after it is free",
        "swap/pool",
        "            if g == 0:\n                self.forget(free)\n",
        "",
    ),
    # Probes, and what failed before.
    Mutation(
        "a request is promised again what failed for it",
        "loading",
        "        if wary:\n",
        "        if False:\n",
    ),
    Mutation(
        "the chunks of a load that begins inside one are counted from its first block",
        "transfers",
        "(first_block % self._blocks_per_chunk + position) //",
        "(position) //",
    ),
    Mutation(
        "a probe that was promised is not withdrawn",
        "loading",
        "            self._breaker.withdraw(request.account)\n",
        "            pass\n",
    ),
    Mutation(
        "a load is no probe when its promise was",
        "load_queue",
        "        self._breaker.hand_over(load.account, job.job_id)\n",
        "",
    ),
    Mutation(
        "blocks of before a reset are found in the swap pool",
        "swap/manager",
        "            self._pool.forget(job.pool_blocks[0])\n        for swapped",
        "            pass\n        for swapped",
    ),
    Mutation(
        "lost blocks of the swap pool are found",
        "swap/manager",
        "            self._pool.forget(gone)\n",
        "            pass\n",
    ),
    Mutation(
        "the probe of an ended request is not withdrawn",
        "swap/manager",
        "            self._breakers[Direction.LOAD].withdraw(request_id)\n        self._returned_at",
        "            pass\n        self._returned_at",
    ),
    Mutation(
        "the probe of a lost request is not withdrawn",
        "swap/manager",
        "        self._breakers[Direction.LOAD].withdraw(swapped.request_id)\n        self._lost",
        "        self._lost",
    ),
    Mutation(
        "the probe of a copy back that nobody waits for is not withdrawn",
        "swap/manager",
        "            self._breakers[Direction.LOAD].withdraw(job.job_id)\n",
        "            pass\n",
    ),
    # Lost caches, and plans on their way.
    Mutation(
        "a loss of the caches changes nothing but the plans",
        "reports",
        "        self._transfers.lose_caches()\n",
        "",
    ),
    Mutation(
        "plans do not say for which caches they were made",
        "scheduler",
        "            early_saves=tuple([job.transfer for job in saves.early]),\n"
        "            cache_epochs=self._workers.epochs,\n",
        "            early_saves=tuple([job.transfer for job in saves.early]),\n",
    ),
    Mutation(
        "the engine does not hear that the caches are gone",
        "reports",
        "        self._lost_caches.append(report.worker_id)\n",
        "",
    ),
    Mutation(
        "a worker that was started anew has its old caches",
        "reports",
        "            self._start_anew(report)\n            self._lose_caches(report)\n",
        "            self._start_anew(report)\n"
        "            self._workers.set_epoch(CacheEpoch(report.worker_id, report.incarnation, 0))\n",
    ),
    Mutation(
        "a swap-out that was planned before the loss was heard of counts",
        "swap/manager",
        '                job.doom("the KV caches were lost")\n',
        "                pass\n",
    ),
    Mutation(
        "a cancel is said once",
        "transfers",
        "        return tuple([job.transfer for job in loads]), tuple(self._to_cancel)\n",
        "        cancelled, self._to_cancel = tuple(self._to_cancel), {}\n"
        "        return tuple([job.transfer for job in loads]), cancelled\n",
    ),
)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with a piece of its source replaced."""

    def __init__(self, name: str, path: str, mutation: Mutation) -> None:
        super().__init__(name, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> Any:
        source = Path(self.path).read_text()
        return compile(apply(self._mutation, source), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Finds the mutated module before anybody else does."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation
        self._name = f"tpu_offload.core.{mutation.path.replace('/', '.')}"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        file = str(path_of(self._mutation))
        return importlib.machinery.ModuleSpec(fullname, _Loader(fullname, file, self._mutation), origin=file)


def path_of(mutation: Mutation) -> Path:
    """The file that it is in."""
    return _ROOT / "tpu_offload" / "core" / f"{mutation.path}.py"


def apply(mutation: Mutation, source: str) -> str:
    """The source with the bug.

    Raises:
      ValueError: the text is not there, or more than once.
    """
    if source.count(mutation.old) != 1:
        raise ValueError(f"mutation {mutation.name!r}: its text is {source.count(mutation.old)} times in its file")
    return source.replace(mutation.old, mutation.new)


def _hunt(mutation: Mutation | None, seeds: Iterable[int], num_steps: int) -> dict[str, Any]:
    """In a child: runs seeds until one finds the bug."""
    if mutation is not None:
        apply(mutation, path_of(mutation).read_text())
        sys.meta_path.insert(0, Finder(mutation))
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
    import jax  # noqa: F401  (before the first fork, because it takes a second)
    import pydantic  # noqa: F401

    known = caught()

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
