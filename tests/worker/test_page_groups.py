"""Layer groups whose layers have pages of several shapes or dtypes: each job copies all of them, bit for bit."""

import threading
from typing import Any

import jax
import numpy as np
import pytest

from tests.caches import random_array, random_caches
from tests.jobs import copy_job
from tests.storage.memory_tier import NAME
from tests.worker.engine import CANCELLED, FAILED, FINISHED, Clock, Poisoned
from tpu_offload import (
    CachesLostError,
    ConfigError,
    CopyJob,
    CopyPart,
    HostStore,
    JobKind,
    JobState,
    OffloadConfig,
    StepPlan,
)
from tpu_offload.kernels import reference
from tpu_offload.layout import KVLayout
from tpu_offload.memory import host_arena
from tpu_offload.types import ChunkKey
from tpu_offload.worker import OffloadWorker
from tpu_offload.worker.arrays import wait_for_all

NUM_BLOCKS, NUM_PLACES = 12, 16
# Interleaved layers with two head sizes, as in Gemma-4, and scales of quantized numbers.
PAGES = [((4, 8, 2, 6), "bfloat16"), ((4, 4, 2, 10), "bfloat16"), ((4, 8, 2, 6), "bfloat16"), ((4, 8), "float32")]
PATHS = ["direct", "staged", "staged saves, direct loads"]


class Engine:
    """A worker with such caches, and numpy copies of what they and the host tier should hold.

    `broken` names page groups and directions, as (1, "load"), whose copies raise; with "caches" in place of "load",
    loads that destroy the caches of that page group.
    """

    def __init__(self, path="direct", *, num_devices=1, broken=(), pages=PAGES, **settings):
        self.rng = np.random.default_rng(7)
        self.caches = [
            cache
            for shape, dtype in pages
            for cache in random_caches(
                self.rng, dtype=dtype, num_devices=num_devices, num_blocks=NUM_BLOCKS, num_layers=1, page_shape=shape
            )
        ]
        self.layout = KVLayout.from_caches(self.caches, block_size=4)
        self.broken, self.arenas = set(broken), []
        save_path, _, load_path = path.partition(" saves, ")
        settings = {
            "num_cpu_chunks": NUM_PLACES // 2,
            "blocks_per_chunk": 2,
            "num_staging_blocks": 6,
            "host_segment_gb": 3 * 2 * self.layout.block_nbytes / 2**30,  # three chunks
            "save_path": save_path,
            "load_path": (load_path or save_path).removesuffix(" loads"),
            "skip_jax_precompile": True,
        } | settings
        self.worker = OffloadWorker(
            OffloadConfig.create(**settings),
            self.layout,
            self.caches,
            clock=Clock(),
            available=2**30,
            wrap_copier=self.wrap,
        )
        self.worker.wait_until_allocated()
        self.expected = [reference.as_bytes(cache) for cache in self.caches]
        self.host = [np.zeros((NUM_PLACES, *cache.shape[1:]), np.uint8) for cache in self.expected]
        self.step_id = self.num_jobs = 0

    def wrap(self, copier, arena):
        if arena not in self.arenas:
            self.arenas.append(arena)
        number = self.arenas.index(arena)
        return Breakable(copier, lambda what: (number, what) in self.broken)

    def job(self, kind, blocks, places):
        self.num_jobs += 1
        return copy_job(self.num_jobs, kind, blocks, places)

    def swap(self, kind, blocks, places):
        self.num_jobs += 1
        part = CopyPart(group_id=0, store=HostStore.SWAP_POOL, block_ids=tuple(blocks), host_block_ids=tuple(places))
        return CopyJob(job_id=self.num_jobs, kind=kind, request_id="r", parts=(part,))

    def expect(self, job):
        blocks, places = list(job.block_ids), [i for part in job.parts for i in part.host_block_ids]
        for cache, pool in zip(self.expected, self.host, strict=True):
            if job.kind in (JobKind.SAVE, JobKind.SWAP_OUT):
                pool[places] = cache[blocks]
            else:
                cache[blocks] = pool[places]

    def step(self, *jobs, forward=False, cancel=()):
        """One step. With `forward` the forward pass writes new bytes into all caches, before the saves."""
        self.step_id += 1
        plan = StepPlan(step_id=self.step_id, jobs=jobs, cancelled_job_ids=tuple(cancel), next_job_id=self.num_jobs + 1)
        self.caches = self.worker.begin_step(plan, self.caches)
        if forward:
            new = [random_array(self.rng, c.shape, c.dtype) for c in self.caches]
            self.caches = [jax.device_put(n, c.sharding) for n, c in zip(new, self.caches, strict=True)]
            self.expected = [reference.as_bytes(n) for n in new]
        self.worker.end_step(plan, self.caches)

    def results(self):
        """Steps until nothing is in flight; results by job id."""
        results: dict[int, Any] = {}
        for _ in range(100):
            report = self.worker.poll(wait=True)
            results |= {result.job_id: result for result in report.results}
            if not self.worker.has_flights:
                return results
            self.step()
        raise AssertionError("the worker never comes to rest")

    def states(self):
        return {job_id: result.state for job_id, result in self.results().items()}

    def check(self):
        for cache, wanted in zip(self.caches, self.expected, strict=True):
            np.testing.assert_array_equal(reference.as_bytes(cache), wanted)


class Breakable:
    """A copier that raises while `is_broken` says so of "save", "load" or "caches"."""

    def __init__(self, copier, is_broken):
        self._copier, self._is_broken = copier, is_broken

    def __getattr__(self, name):
        return getattr(self._copier, name)

    def save(self, *args):
        if self._is_broken("save"):
            raise RuntimeError("injected")
        return self._copier.save(*args)

    def load(self, segment_id, moves, kv_caches):
        if self._is_broken("caches"):
            kv_caches[0].delete()
        if self._is_broken("caches") or self._is_broken("load"):
            raise RuntimeError("injected")
        return self._copier.load(segment_id, moves, kv_caches)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_random_jobs(path, num_devices):
    pages = PAGES if num_devices == 1 else [(s, d) for s, d in PAGES if s[1] % 2 == 0 and len(s) > 2]
    engine = Engine(path, num_devices=num_devices, pages=pages)
    written: list[int] = []
    states: dict[int, JobState] = {}
    for _ in range(30):
        blocks = engine.rng.permutation(NUM_BLOCKS).tolist()
        size = int(engine.rng.integers(1, 6))
        known = [place for place in written if engine.rng.random() < 0.7][:size]
        loads = [engine.job(JobKind.LOAD, blocks[: len(known)], known)] if known else []
        left = [place for place in engine.rng.permutation(NUM_PLACES).tolist() if place not in known]
        saves = [engine.job(JobKind.SAVE, blocks[6 : 6 + size], left[:size])]
        engine.step(*loads, *saves)
        for job in (*loads, *saves):
            engine.expect(job)
        written = sorted({*written, *left[:size]})
        states |= engine.states()
        engine.check()
        assert set(states.values()) == {FINISHED}
    assert len(states) > 50


@pytest.mark.parametrize("path", PATHS)
def test_a_save_reads_what_its_pass_wrote_in_all_page_groups(path):
    engine = Engine(path)
    save = engine.job(JobKind.SAVE, [1, 5, 7], [0, 8, 15])
    engine.step(save, forward=True)
    engine.expect(save)
    engine.step(forward=True)
    assert engine.states() == {save.job_id: FINISHED}
    load = engine.job(JobKind.LOAD, [9, 10, 11], [0, 8, 15])
    engine.step(load)
    engine.expect(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.check()


def test_a_load_is_written_when_its_last_page_group_is():
    engine = Engine("staged")
    save = engine.job(JobKind.SAVE, [0, 1], [0, 1])
    engine.step(save)
    engine.expect(save)
    assert engine.states() == {save.job_id: FINISHED}
    load = engine.job(JobKind.LOAD, [2, 3], [0, 1])
    engine.step(load)
    wait_for_all([flight.waiting_on for group in engine.worker._tier._groups for flight in group.flights], timeout_s=60)
    first, *others = engine.worker._tier._groups
    assert all(len(group.flights) == 1 for group in (first, *others))
    assert engine.worker._tier._staging.room == 6 - 2  # each block once
    first.resume(engine.caches, step_id=99)
    assert engine.worker._jobs.take_written() == ()
    for group in others:
        group.resume(engine.caches, step_id=99)
    assert engine.worker._jobs.take_written() == (load.job_id,)
    assert engine.states() == {load.job_id: FINISHED}
    engine.expect(load)
    engine.check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", range(3))
def test_a_copy_that_fails_in_one_page_group_fails_the_job(path, number):
    engine = Engine(path)
    save = engine.job(JobKind.SAVE, [0, 1, 2], [4, 5, 6])
    engine.step(save)
    engine.expect(save)
    assert engine.states() == {save.job_id: FINISHED}

    engine.broken = {(number, "save")}
    again = engine.job(JobKind.SAVE, [0, 1], [8, 9])
    engine.step(again)
    assert engine.states() == {again.job_id: FAILED}

    engine.broken = {(number, "load")}
    load = engine.job(JobKind.LOAD, [9, 10, 11], [4, 5, 6])
    engine.step(load)
    assert engine.states() == {load.job_id: FAILED}

    engine.broken = set()
    load = engine.job(JobKind.LOAD, [9, 10, 11], [4, 5, 6])
    engine.step(load)
    engine.expect(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.check()


def test_what_was_saved_in_some_page_groups_only_is_not_loaded():
    engine = Engine(broken={(1, "save")})
    save = engine.job(JobKind.SAVE, [0], [3])
    engine.step(save)
    assert engine.states() == {save.job_id: FAILED}
    load = engine.job(JobKind.LOAD, [1], [3])
    engine.step(load)
    (result,) = engine.results().values()
    assert result.state is FAILED
    assert "host block 3 is empty" in result.error
    engine.check()


def test_a_load_that_destroys_the_caches_of_one_page_group_loses_all():
    engine = Engine()
    save = engine.job(JobKind.SAVE, [0], [3])
    engine.step(save)
    engine.results()
    engine.broken = {(1, "caches")}
    load = engine.job(JobKind.LOAD, [1], [3])
    with pytest.raises(CachesLostError):
        engine.step(load)
    assert engine.states()[load.job_id] in (FAILED, CANCELLED)


def test_what_one_page_group_has_lost_is_reported_once_and_lost():
    engine = Engine()
    save = engine.job(JobKind.SAVE, range(12), range(12))
    engine.step(save)
    assert engine.states() == {save.job_id: FINISHED}
    for group in engine.worker._tier._groups[:2]:
        group.memory.check_segment(1, lost=True)
    load = engine.job(JobKind.LOAD, [1], [7])
    engine.step(load)
    report = engine.worker.poll()  # a segment is lost when a job fails, so both are reported together
    assert [result.state for result in report.results] == [FAILED]
    assert report.lost_slots == ((3, 6),)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_request_swap(num_devices):
    pages = PAGES if num_devices == 1 else PAGES[:3]
    engine = Engine(num_devices=num_devices, pages=pages, swap_gb=0.001, num_cpu_chunks=0)
    swap_out = engine.swap(JobKind.SWAP_OUT, [0, 3, 5], [0, 2, 4])
    engine.step(swap_out)
    engine.expect(swap_out)
    assert engine.states() == {swap_out.job_id: FINISHED}
    engine.step(forward=True)
    swap_in = engine.swap(JobKind.SWAP_IN, [7, 8, 9], [4, 0, 2])
    engine.step(swap_in)
    engine.expect(swap_in)
    assert engine.states() == {swap_in.job_id: FINISHED}
    engine.check()
    (ready,) = engine.worker.poll().num_swap_blocks
    assert ready >= 5


def key(number):
    return ChunkKey(bytes([number]) * 16 + b"key")


def chunk_job(engine, kind, *chunks):
    engine.num_jobs += 1
    return CopyJob(job_id=engine.num_jobs, kind=kind, chunks=tuple((key(number), slot) for number, slot in chunks))


# Parts of a payload that leave the next ones unaligned.
ODD_PAGES = [((4, 3), "int8"), ((4, 8), "float32"), ((3, 1), "int8"), ((4, 4, 2, 10), "bfloat16")]


@pytest.mark.parametrize("pages", [PAGES, ODD_PAGES], ids=["pages", "odd pages"])
def test_chunks_go_to_storage_and_come_back_into_other_slots(pages):
    engine = Engine(pages=pages, storage_tier=NAME, num_storage_chunks=16)
    save = engine.job(JobKind.SAVE, range(6), [0, 1, 2, 3, 14, 15])
    engine.step(save, forward=True)
    engine.expect(save)
    cascade = chunk_job(engine, JobKind.CASCADE, (1, 0), (2, 1), (3, 7))
    engine.step(cascade)
    assert set(engine.states().values()) == {FINISHED}
    stored = [pool[[14, 15, 0, 1, 2, 3]] for pool in engine.host]
    save = engine.job(JobKind.SAVE, range(6, 12), [0, 1, 2, 3, 14, 15])
    engine.step(save, forward=True)
    engine.expect(save)
    promote = chunk_job(engine, JobKind.PROMOTE, (3, 0), (1, 5), (2, 7))
    engine.step(promote)
    assert set(engine.states().values()) == {FINISHED}
    for pool, chunks in zip(engine.host, stored, strict=True):
        pool[[0, 1, 10, 11, 14, 15]] = chunks
    load = engine.job(JobKind.LOAD, range(8), [0, 1, 10, 11, 14, 15, 2, 3])
    engine.step(load)
    engine.expect(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.check()
    engine.worker.close()


def test_a_promotion_that_fails_on_its_way_still_finds_what_is_lost(monkeypatch):
    """Its write into one page group fails on the device, after the next one could not be dispatched."""
    engine = Engine(storage_tier=NAME, num_storage_chunks=16)
    save = engine.job(JobKind.SAVE, range(12), range(12))
    engine.step(save)
    cascade = chunk_job(engine, JobKind.CASCADE, (1, 0))
    engine.step(cascade)
    assert set(engine.states().values()) == {FINISHED}
    first, second, *_ = engine.worker._storage._copiers

    def fail(*args):
        raise RuntimeError("injected")

    write = first.write
    monkeypatch.setattr(first, "write", lambda *args: (write(*args), Poisoned())[1])
    monkeypatch.setattr(second, "write", fail)
    promote = chunk_job(engine, JobKind.PROMOTE, (1, 7))
    engine.step(promote)
    results: dict[int, JobState] = {}
    lost: list[tuple[int, int]] = []
    while engine.worker.has_flights:
        report = engine.worker.poll(wait=True)
        results |= {result.job_id: result.state for result in report.results}
        lost += report.lost_slots
        engine.step()
    assert results == {promote.job_id: FAILED}
    assert lost == [(6, 8)]
    engine.worker.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_swap_in_reads_both_stores(path):
    engine = Engine(path, swap_gb=0.001)
    save = engine.job(JobKind.SAVE, [3, 4], [6, 1])
    engine.step(save)
    engine.expect(save)
    swap_out = engine.swap(JobKind.SWAP_OUT, [9], [7])
    engine.step(swap_out)
    assert set(engine.states().values()) == {FINISHED}
    swapped = [cache[9].copy() for cache in engine.expected]
    engine.step(forward=True)
    parts = (
        CopyPart(group_id=0, store=HostStore.HOST_TIER, block_ids=(0, 1), host_block_ids=(6, 1)),
        CopyPart(group_id=0, store=HostStore.SWAP_POOL, block_ids=(2,), host_block_ids=(7,)),
    )
    for job_id, state in ((90, FINISHED), (91, FAILED)):
        swap_in = CopyJob(job_id=job_id, kind=JobKind.SWAP_IN, request_id="r", parts=parts)
        engine.num_jobs = job_id
        engine.step(swap_in)
        if state is FINISHED:
            for cache, pool, block in zip(engine.expected, engine.host, swapped, strict=True):
                cache[[0, 1]], cache[2] = pool[[6, 1]], block
        assert engine.states() == {job_id: state}
        engine.check()
        engine.worker._tier._groups[-1].memory.check_segment(1, lost=True)  # in the last page group only
    engine.worker.close()


def test_a_load_that_is_cancelled_between_page_groups():
    engine = Engine("staged")
    save = engine.job(JobKind.SAVE, [0, 1], [0, 1])
    engine.step(save)
    engine.results()
    load = engine.job(JobKind.LOAD, [2, 3], [0, 1])
    engine.step(load)
    groups = engine.worker._tier._groups
    wait_for_all([flight.waiting_on for group in groups for flight in group.flights], timeout_s=60)
    groups[0].resume(engine.caches, step_id=99)
    engine.step(cancel=[load.job_id])
    assert engine.worker._jobs.take_written() == ()
    assert engine.states() == {load.job_id: CANCELLED}


def test_memory_that_one_page_group_cannot_have_is_not_taken_by_the_others(monkeypatch):
    real, allowed = host_arena.pinned_zeros, threading.Event()

    def allocate(struct):
        if struct.dtype == np.float32:  # the last page group
            allowed.set()
            raise MemoryError("no more")
        allowed.wait(60)
        return real(struct)

    monkeypatch.setattr(host_arena, "pinned_zeros", allocate)
    engine = Engine()
    assert engine.worker._tier.num_chunks_ready == 0
    assert max(len(group.memory.arena._segments) for group in engine.worker._tier._groups) <= 1


@pytest.mark.parametrize("settings", [{"save_path": "fused"}, {"load_path": "fused"}])
def test_fused_copies_are_refused_in_one_line(settings):
    with pytest.raises(
        ConfigError, match="pages of 3 shapes or dtypes; fused copies support one: set direct or staged"
    ):
        Engine(**settings)
