"""Random lives of a worker on real arrays: no wrong byte, no job lost or ended twice, whatever fails in what order."""

import collections
import contextlib
import dataclasses
import functools
import random
from typing import Any

import jax
import numpy as np
import pytest

from tests.caches import random_array
from tests.inside.worker import arena_segments, lost_segments, rebuilt_segments, segment_structs, worker_jobs
from tests.jobs import host_block_ids
from tests.worker.engine import (
    BLOCKS_PER_CHUNK,
    CANCELLED,
    FAILED,
    FINISHED,
    NUM_CHUNKS,
    PATHS,
    Engine,
    Poisoned,
    broken,
    forward,
)
from tpu_offload.kernels import reference
from tpu_offload.kernels.pages import bitcast
from tpu_offload.memory import host_arena
from tpu_offload.types import CopyJob, Direction, JobKind, JobState, StepPlan, StepReport
from tpu_offload.worker import worker as worker_module

NUM_BLOCKS = 12
CHUNKS = np.arange(NUM_CHUNKS * BLOCKS_PER_CHUNK).reshape(NUM_CHUNKS, -1).tolist()
# What a job may fail of here; anything else is the worker's own doing.
pytestmark = pytest.mark.usefixtures("compiled_once")

REASONS = (
    "halted",
    "was lost to a failed save",
    "was lost, or never written",
    "the host memory of its chunks was lost",
    "did not return",
)


@functools.partial(jax.jit, donate_argnums=0)
def write_block(caches, pages, block_id):
    """Pages are of the carrier type: the CPU backend does not keep every bit of a page of float8_e5m2."""

    def write(cache, page):
        return jax.lax.dynamic_update_slice_in_dim(bitcast(cache, page.dtype), page, block_id, axis=0)

    return [bitcast(write(c, p), c.dtype) for c, p in zip(caches, pages, strict=True)]


@dataclasses.dataclass
class Copy:
    """A job that has not ended.

    Attributes:
      wanted: u8[blocks, layers, ...], the bytes that it brings when it finishes.
      taken_back: it was cancelled, and its blocks may have new owners.
      lost: the segment was lost in the meantime, so that it brings nothing, however it ends.
    """

    job: CopyJob
    wanted: Any = None
    taken_back: bool = False
    lost: bool = False


class Life:
    """One seed decides everything: jobs, cancels, what the passes write, what is late and, unless it is 0, faults.

    `engine.expected` and `engine.host` say what the caches and the host pool hold, but for the blocks and
    places that are unknown: a copy into them is under way, or has failed.
    """

    def __init__(self, path: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.fault_rate = 0.15 if seed else 0.0
        self.late = (0.5, 0.0, 0.8)[seed % 3]
        self.engine = Engine(path, dtype=("bfloat16", "float8_e5m2")[seed % 2])
        self.worker = self.engine.worker
        self.written: set[int] = set()
        self.live: dict[int, Copy] = {}
        self.unknown_blocks: set[int] = set()
        self.unknown_places: set[int] = set()
        self.ended: collections.Counter[JobState] = collections.Counter()
        # What the clock would decide is drawn instead.
        self.rebuild = host_arena._rebuild
        monkeypatch.setattr(host_arena, "_rebuild", lambda *args: None)
        monkeypatch.setattr(worker_module, "is_ready", self.is_ready)

    def is_ready(self, array: Any) -> bool:
        with contextlib.suppress(RuntimeError):
            array.block_until_ready()
        return self.rng.random() >= self.late

    # What is drawn.

    def loads(self) -> list[Copy]:
        """Those whose blocks are theirs."""
        return [c for c in self.live.values() if c.job.direction is Direction.LOAD and not c.taken_back]

    def free_blocks(self) -> list[int]:
        """Those that no load is filling; saves have read theirs at the end of their step."""
        return sorted(set(range(NUM_BLOCKS)).difference(*(copy.job.block_ids for copy in self.loads())))

    def draw_jobs(self, direction: Direction) -> tuple[CopyJob, ...]:
        """Up to two jobs of some chunks each, the first and the last of which may be cut."""
        rng, engine, saving = self.rng, self.engine, direction is Direction.SAVE
        jobs = []
        for _ in range(rng.randint(0, 2)):
            busy = {i for copy in self.live.values() for i in host_block_ids(copy.job)}
            taken, free = busy if saving else self.unknown_places, self.free_blocks()
            usable = [chunk for chunk in CHUNKS if taken.isdisjoint(chunk)]
            places = [i for chunk in rng.sample(usable, min(len(usable), rng.randint(1, 3))) for i in chunk]
            places = places[rng.random() < 0.3 : len(places) - (rng.random() < 0.3)]
            if not places or len(free) < len(places):
                continue
            job = engine.job(direction, rng.sample(free, len(places)), places)
            self.live[job.job_id] = Copy(job, None if saving else engine.host[places])
            (self.unknown_places if saving else self.unknown_blocks).update(places if saving else job.block_ids)
            jobs.append(job)
        return tuple(jobs)

    def draw_cancels(self) -> tuple[int, ...]:
        cancelled = [copy for copy in self.loads() if self.rng.random() < 0.3]
        for copy in cancelled:
            copy.taken_back = True
        return tuple(copy.job.job_id for copy in cancelled)

    def break_programs(self, patch: pytest.MonkeyPatch) -> None:
        """Makes programs raise; those that donate a segment may destroy it."""
        engine, rng = self.engine, self.rng
        saving = ("save", "resume_save") if engine.save_path == "staged" else ("save",)
        loading = ("load", "resume_load") if engine.load_path == "staged" else ("load",)
        for copier, names in (engine.saver, saving), (engine.loader, loading):
            name = rng.choice([*names, None])
            takes = name == saving[-1] and rng.random() < 0.5
            if name:
                patch.setattr(copier, name, broken(RuntimeError("halted"), takes=engine.pool if takes else None))

    # What happens.

    def step(self, *, quiet: bool = False) -> None:
        rng, fault_rate = self.rng, 0.0 if quiet else self.fault_rate
        self.engine.step_id += 1
        plan = StepPlan(step_id=self.engine.step_id)
        if not quiet:
            cancelled = self.draw_cancels()  # first: their blocks may go to others in the same plan
            plan = StepPlan(
                step_id=plan.step_id,
                jobs=self.draw_jobs(Direction.LOAD) + self.draw_jobs(Direction.SAVE),
                cancelled_job_ids=cancelled,
            )
        with pytest.MonkeyPatch.context() as patch:
            if rng.random() < fault_rate:
                self.break_programs(patch)
            self.run_pass(plan, fault_rate)
            if self.engine.flights and rng.random() < fault_rate / 3:
                rng.choice(self.engine.flights).waiting_on = Poisoned()
            self.check_written(self.worker.take_written_loads())
            self.take(self.worker.poll(wait=quiet or rng.random() < 0.2))
        pool = self.engine.pool
        for segment_id in sorted(lost_segments(pool) - rebuilt_segments(pool).keys()):
            if rng.random() < 0.5:
                self.rebuild(segment_structs(pool), segment_id, rebuilt_segments(pool))

    def run_pass(self, plan: StepPlan, fault_rate: float) -> None:
        engine, worker, rng = self.engine, self.worker, self.rng
        fuse = rng.random() < 0.85
        engine.caches = worker.begin_step(plan, engine.caches, fuse=fuse)
        fused = worker.fused_step()
        self.compute()
        for job in plan.of(JobKind.SAVE):
            self.live[job.job_id].wanted = np.stack([c[list(job.block_ids)] for c in engine.expected], axis=1)
        if fuse and worker.offers_fused and rng.random() < fault_rate:  # it fails
            for part in fused.segment if rng.random() < 0.5 else ():
                part.delete()
            if rng.random() < 0.5:
                worker.end_step(plan, engine.caches)
            return
        engine.num_fused += fused.inputs is not None
        engine.caches, outcome = forward(engine.caches, *fused)
        worker.end_step(plan, engine.caches, outcome)

    def compute(self) -> None:
        """Writes some blocks that are no load's, and all of those that are unknown."""
        engine = self.engine
        for block_id in self.free_blocks():
            if block_id in self.unknown_blocks or self.rng.random() < 0.3:
                carrier = self.engine.spec.carrier
                pages = [random_array(engine.rng, (1, *cache.shape[1:]), carrier) for cache in engine.caches]
                engine.caches = write_block(engine.caches, pages, block_id)
                for layer, page in enumerate(pages):
                    engine.expected[layer][block_id] = reference.as_bytes(page)[0]
                self.unknown_blocks.discard(block_id)

    def take(self, report: StepReport) -> None:
        for _, first, end in report.lost_slots:
            places = range(first * BLOCKS_PER_CHUNK, end * BLOCKS_PER_CHUNK)
            self.unknown_places.update(places)
            for copy in self.live.values():
                copy.lost |= not set(places).isdisjoint(host_block_ids(copy.job))
        for result in report.results:
            assert result.job_id in self.live, "a job has ended twice"
            copy = self.live.pop(result.job_id)
            self.ended[result.state] += 1
            assert copy.taken_back or result.state is not CANCELLED
            assert result.state is not FAILED or (self.fault_rate and any(r in result.error for r in REASONS)), result
            if result.state is FINISHED and not copy.lost and not copy.taken_back:
                block_ids, host_ids = list(copy.job.block_ids), list(host_block_ids(copy.job))
                if copy.job.direction is Direction.SAVE:
                    self.engine.host[host_ids] = copy.wanted
                    self.unknown_places.difference_update(host_ids)
                else:
                    assert result.job_id in self.written
                    for layer, cache in enumerate(self.engine.expected):
                        cache[block_ids] = copy.wanted[:, layer]
                    self.unknown_blocks.difference_update(block_ids)

    # What is asserted.

    def check_written(self, job_ids: tuple[int, ...]) -> None:
        """What is dispatched from now on sees the blocks of these loads, which nothing else may have touched."""
        for job_id in job_ids:
            copy = self.live[job_id]
            assert not copy.taken_back
            assert job_id not in self.written
            self.written.add(job_id)
            if not copy.lost:
                for layer, cache in enumerate(self.engine.caches):
                    found = reference.as_bytes(cache)[list(copy.job.block_ids)]
                    np.testing.assert_array_equal(found, copy.wanted[:, layer])

    def check(self) -> None:
        blocks = sorted(set(range(NUM_BLOCKS)) - self.unknown_blocks)
        for cache, wanted in zip(self.engine.caches, self.engine.expected, strict=True):
            np.testing.assert_array_equal(reference.as_bytes(cache)[blocks], wanted[blocks])
        pool = self.engine.pool
        for place in sorted(set(range(len(self.engine.host))) - self.unknown_places):
            segment_id, row = divmod(place, self.engine.spec.segment_blocks)
            segment = arena_segments(pool)[segment_id]
            if segment_id in lost_segments(pool) or any(part.is_deleted() for part in segment):
                assert self.live, "a segment is lost, and no result is left to report it"
            else:
                found = np.concatenate([self.engine.page_bytes(np.asarray(part)[row : row + 1])[0] for part in segment])
                np.testing.assert_array_equal(found, self.engine.host[place])

    def end(self) -> None:
        for _ in range(100):
            if not self.live:
                break
            self.step(quiet=True)
        assert not self.live, "jobs that never end"
        assert not self.engine.flights
        assert not worker_jobs(self.worker)._jobs
        assert not self.engine.tier.awaits_pass
        self.check()
        self.worker.close()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            if self.rng.random() < 0.3:
                self.check()
        self.end()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("path", PATHS)
def test_random_life(path, seed, monkeypatch):
    life = Life(path, seed, monkeypatch)
    life.run(60)
    assert life.ended[FINISHED] > 20, life.ended
    assert (life.ended[FAILED] > 0) == (seed > 0), life.ended
    assert (life.ended[CANCELLED] > 5) == (life.engine.load_path == "staged"), life.ended  # others write at once
    assert (life.engine.num_fused > 5) == life.worker.offers_fused
