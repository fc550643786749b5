"""Layer groups whose layers have pages of several shapes or dtypes: each job copies all of them, bit for bit."""

import dataclasses
import logging
import threading
import time

import numpy as np
import pytest

from tests.caches import random_caches
from tests.inside.worker import (
    arena_segments,
    host_tier,
    slot_pools,
    staging_usage,
    swap_groups,
    tier_groups,
    worker_jobs,
)
from tests.jobs import copy_job, storage_job
from tests.storage.memory_tier import NAME
from tests.worker.engine import (
    CANCELLED,
    FAILED,
    FINISHED,
    EngineBase,
    Poisoned,
    broken,
    ending_with,
    split_path,
    wait_until_rebuilt,
)
from tpu_offload import CachesLostError, ConfigError, CopyJob, CopyPart, HostStore, JobKind, JobState, StepPlan
from tpu_offload.layout import KVLayout
from tpu_offload.memory import host_arena
from tpu_offload.types import Direction
from tpu_offload.worker.arrays import wait_for_all

pytestmark = pytest.mark.usefixtures("compiled_once")

NUM_BLOCKS, NUM_PLACES = 12, 16
TIER, POOL = HostStore.HOST_TIER, HostStore.SWAP_POOL
# Interleaved layers with two head sizes, as in Gemma-4, and scales of quantized numbers.
PAGES = [((4, 8, 2, 6), "bfloat16"), ((4, 4, 2, 10), "bfloat16"), ((4, 8, 2, 6), "bfloat16"), ((4, 8), "float32")]
PAGES_OF_TWO_DEVICES = PAGES[:3]
# Parts of a payload that leave the next ones unaligned.
ODD_PAGES = [((4, 3), "int8"), ((4, 8), "float32"), ((3, 1), "int8"), ((4, 4, 2, 10), "bfloat16")]
PATHS = ["direct", "staged", "staged saves, direct loads"]
STORAGE = {"storage_tier": NAME, "num_storage_chunks": 16}
INJECTED = RuntimeError("injected")


class Engine(EngineBase):
    """With such caches, and numpy copies of both host stores."""

    def __init__(self, path="direct", *, num_devices=1, pages=PAGES, wait=True, **settings):
        rng = np.random.default_rng(7)
        caches = [
            cache
            for shape, dtype in pages
            for cache in random_caches(
                rng, dtype=dtype, num_devices=num_devices, num_blocks=NUM_BLOCKS, num_layers=1, page_shape=shape
            )
        ]
        layout = KVLayout.from_caches(caches, block_size=4)
        save_path, load_path = split_path(path)
        settings = {
            "num_cpu_chunks": NUM_PLACES // 2,
            "blocks_per_chunk": 2,
            "num_staging_blocks": 6,
            "host_segment_gb": 3 * 2 * layout.block_nbytes / 2**30,  # three chunks
            "save_path": save_path,
            "load_path": load_path,
        } | settings
        super().__init__(rng, caches, layout, settings)
        if wait:
            self.worker.wait_until_allocated()
        self.host = {
            store: [np.zeros((NUM_PLACES, *cache.shape[1:]), np.uint8) for cache in self.expected]
            for store in (TIER, POOL)
        }
        self.step_id = 0

    @property
    def groups(self):
        """The host tier's copies, by page group."""
        return tier_groups(self.worker)

    def copier(self, number, direction):
        """Of a page group of the host tier."""
        return self.groups[number].copiers[direction]

    def save(self, blocks, places):
        return copy_job(self.new_job_id(), JobKind.SAVE, blocks, places)

    def load(self, blocks, places):
        return copy_job(self.new_job_id(), JobKind.LOAD, blocks, places)

    def swap(self, kind, *parts):
        """Of parts (store, blocks, places)."""
        copied = [
            CopyPart(group_id=0, store=store, block_ids=tuple(blocks), host_block_ids=tuple(places))
            for store, blocks, places in parts
        ]
        return CopyJob(job_id=self.new_job_id(), kind=kind, request_id="r", parts=tuple(copied))

    def move(self, kind, *chunks):
        """Of chunks (name, slot)."""
        return storage_job(self.new_job_id(), kind, chunks)

    def expect(self, job):
        for part in job.parts:
            blocks, places = list(part.block_ids), list(part.host_block_ids)
            for cache, pool in zip(self.expected, self.host[part.store], strict=True):
                if job.direction is Direction.SAVE:
                    pool[places] = cache[blocks]
                else:
                    cache[blocks] = pool[places]

    def step(self, *jobs, forward=False, cancel=()):
        """One step. With `forward` the forward pass writes new bytes into all caches, before the saves."""
        self.step_id += 1
        plan = StepPlan(step_id=self.step_id, jobs=jobs, cancelled_job_ids=tuple(cancel), next_job_id=self.num_jobs + 1)
        self.caches = self.worker.begin_step(plan, self.caches)
        if forward:
            self.scribble()
        self.worker.end_step(plan, self.caches)

    def run(self, job, state=FINISHED, *, forward=False):
        """A step with a job that ends in this state; its result. What a failed load has written is not checked."""
        self.step(job, forward=forward)
        (result,) = self.drain().values()
        assert (result.job_id, result.state) == (job.job_id, state)
        if state is FINISHED:
            self.expect(job)
            self.check_caches()
        return result

    def refused(self, job):
        """The error of a job that is refused before anything is copied."""
        error = self.run(job, FAILED).error
        self.check_caches()
        return error


@pytest.mark.parametrize("lockstep", [False, True], ids=["", "in lockstep"])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_random_jobs(path, num_devices, lockstep):
    engine = Engine(path, num_devices=num_devices, pages=PAGES if num_devices == 1 else PAGES_OF_TWO_DEVICES)
    if lockstep:  # as on hosts that share a model; loads come in pieces
        engine.in_lockstep()
    written: list[int] = []
    states: dict[int, JobState] = {}
    for _ in range(30):
        blocks = engine.rng.permutation(NUM_BLOCKS).tolist()
        size = int(engine.rng.integers(1, 6))
        known = [place for place in written if engine.rng.random() < 0.7][:size]
        loads = [engine.load(blocks[: len(known)], known)] if known else []
        if lockstep:
            loads = [dataclasses.replace(load, num_staging_blocks=2) for load in loads]
        left = [place for place in engine.rng.permutation(NUM_PLACES).tolist() if place not in known]
        saves = [engine.save(blocks[6 : 6 + size], left[:size])]
        engine.step(*loads, *saves)
        for job in (*loads, *saves):
            engine.expect(job)
        written = sorted({*written, *left[:size]})
        states |= engine.states()
        engine.check_caches()
        assert set(states.values()) == {FINISHED}
    assert len(states) > 50


@pytest.mark.parametrize("path", PATHS)
def test_a_save_reads_what_its_pass_wrote_in_all_page_groups(path):
    engine = Engine(path)
    save = engine.save([1, 5, 7], [0, 8, 15])
    engine.step(save, forward=True)
    engine.expect(save)
    engine.step(forward=True)
    assert engine.states() == {save.job_id: FINISHED}
    engine.run(engine.load([9, 10, 11], [0, 8, 15]))


def start_staged_load(engine):
    """A load of which each page group has staged its part."""
    engine.run(engine.save([0, 1], [0, 1]))
    load = engine.load([2, 3], [0, 1])
    engine.step(load)
    wait_for_all([flight.waiting_on for group in engine.groups for flight in group.flights], timeout_s=60)
    assert all(len(group.flights) == 1 for group in engine.groups)
    return load


def test_a_load_is_written_when_its_last_page_group_is():
    engine = Engine("staged")
    load = start_staged_load(engine)
    assert staging_usage(engine.worker).room == 6 - 2  # each block once
    first, *others = engine.groups
    first.resume(engine.caches, step_id=99)
    assert worker_jobs(engine.worker).take_written() == ()
    for group in others:
        group.resume(engine.caches, step_id=99)
    assert worker_jobs(engine.worker).take_written() == (load.job_id,)
    assert engine.states() == {load.job_id: FINISHED}
    engine.expect(load)
    engine.check_caches()


def test_a_load_that_is_cancelled_between_page_groups():
    engine = Engine("staged")
    load = start_staged_load(engine)
    engine.groups[0].resume(engine.caches, step_id=99)
    engine.step(cancel=[load.job_id])
    assert worker_jobs(engine.worker).take_written() == ()
    assert engine.states() == {load.job_id: CANCELLED}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", range(3))
def test_a_copy_that_fails_in_one_page_group_fails_the_job(monkeypatch, path, number):
    engine = Engine(path)
    engine.run(engine.save([0, 1, 2], [4, 5, 6]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.copier(number, Direction.SAVE), "save", broken(INJECTED))
        patch.setattr(engine.copier(number, Direction.LOAD), "load", broken(INJECTED))
        engine.run(engine.save([0, 1], [8, 9]), FAILED)
        engine.run(engine.load([9, 10, 11], [4, 5, 6]), FAILED)
    engine.run(engine.load([9, 10, 11], [4, 5, 6]))


def test_what_was_saved_in_some_page_groups_only_is_not_loaded(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(engine.copier(1, Direction.SAVE), "save", broken(INJECTED))
    engine.run(engine.save([0], [3]), FAILED)
    assert "host block 3 is empty" in engine.refused(engine.load([1], [3]))


def test_a_load_that_destroys_the_caches_of_one_page_group_loses_all(monkeypatch):
    engine = Engine()
    engine.run(engine.save([0], [3]))
    monkeypatch.setattr(engine.copier(1, Direction.LOAD), "load", broken(INJECTED, takes="caches"))
    load = engine.load([1], [3])
    with pytest.raises(CachesLostError):
        engine.step(load)
    assert engine.states()[load.job_id] in (FAILED, CANCELLED)


def test_what_one_page_group_has_lost_is_reported_once_and_lost():
    engine = Engine()
    engine.run(engine.save(range(12), range(12)))
    for group in engine.groups[:2]:
        group.memory.check_segment(1, lost=True)
    engine.step(engine.load([1], [7]))
    report = engine.worker.poll()  # a segment is lost when a job fails, so both are reported together
    assert [result.state for result in report.results] == [FAILED]
    assert report.lost_slots == ((0, 3, 6),)


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("number", range(3))
def test_what_one_page_group_has_lost_is_empty_in_all_when_it_is_allocated_again(monkeypatch, path, number):
    engine = Engine(path)
    engine.run(engine.save(range(12), range(12)))
    with monkeypatch.context() as patch:  # the program fails on the device
        copier = engine.copier(number, Direction.SAVE)
        name = "resume_save" if path == "staged" else "save"
        patch.setattr(copier, name, ending_with(getattr(copier, name), Poisoned()))
        assert "core halted" in engine.run(engine.save([0], [7]), FAILED).error
    assert "host block 6 is empty" in engine.refused(engine.load([5, 6], [6, 8]))
    wait_until_rebuilt(engine.groups[number].memory.arena, 1)
    engine.run(engine.save([4], [6]))
    assert "host block 8 is empty" in engine.refused(engine.load([5, 6], [6, 8]))
    engine.run(engine.load([5], [6]))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_request_swap(num_devices):
    pages = PAGES if num_devices == 1 else PAGES_OF_TWO_DEVICES
    engine = Engine(num_devices=num_devices, pages=pages, swap_gb=0.001, num_cpu_chunks=0)
    engine.run(engine.swap(JobKind.SWAP_OUT, (POOL, [0, 3, 5], [0, 2, 4])))
    engine.step(forward=True)
    engine.run(engine.swap(JobKind.SWAP_IN, (POOL, [7, 8, 9], [4, 0, 2])))
    (ready,) = engine.worker.poll().num_swap_blocks
    assert ready >= 5


@pytest.mark.parametrize("path", PATHS)
def test_a_swap_in_reads_both_stores(path):
    engine = Engine(path, swap_gb=0.001)
    engine.run(engine.save([3, 4], [6, 1]))
    engine.run(engine.swap(JobKind.SWAP_OUT, (POOL, [9], [7])))
    engine.step(forward=True)
    parts = (TIER, [0, 1], [6, 1]), (POOL, [2], [7])
    engine.run(engine.swap(JobKind.SWAP_IN, *parts))
    engine.groups[-1].memory.check_segment(1, lost=True)  # in the last page group only
    assert "is empty" in engine.refused(engine.swap(JobKind.SWAP_IN, *parts))
    engine.worker.close()


@pytest.mark.parametrize(
    ("pages", "num_devices"),
    [(PAGES, 1), (ODD_PAGES, 1), (PAGES_OF_TWO_DEVICES, 2)],
    ids=["pages", "odd pages", "two devices"],
)
def test_chunks_go_to_storage_and_come_back_into_other_slots(pages, num_devices):
    engine = Engine(pages=pages, num_devices=num_devices, **STORAGE)
    engine.run(engine.save(range(6), [0, 1, 2, 3, 14, 15]), forward=True)
    engine.run(engine.move(JobKind.CASCADE, (1, 0), (2, 1), (3, 7)))
    stored = [pool[[14, 15, 0, 1, 2, 3]] for pool in engine.host[TIER]]
    engine.run(engine.save(range(6, 12), [0, 1, 2, 3, 14, 15]), forward=True)
    engine.run(engine.move(JobKind.PROMOTE, (3, 0), (1, 5), (2, 7)))
    for pool, chunks in zip(engine.host[TIER], stored, strict=True):
        pool[[0, 1, 10, 11, 14, 15]] = chunks
    engine.run(engine.load(range(8), [0, 1, 10, 11, 14, 15, 2, 3]))
    engine.worker.close()


def test_a_promotion_that_fails_on_its_way_still_finds_what_is_lost(monkeypatch):
    """Its write into one page group fails on the device, after the next one could not be dispatched."""
    engine = Engine(**STORAGE)
    engine.run(engine.save(range(12), range(12)))
    engine.run(engine.move(JobKind.CASCADE, (1, 0)))
    first, second, *_ = slot_pools(engine.worker)[0].copiers
    write = first.write
    monkeypatch.setattr(first, "write", lambda *args: (write(*args), Poisoned())[1])
    monkeypatch.setattr(second, "write", broken(INJECTED))
    promote = engine.move(JobKind.PROMOTE, (1, 7))
    engine.step(promote)
    states: dict[int, JobState] = {}
    lost: list[tuple[int, int, int]] = []
    while engine.worker.has_flights:
        report = engine.worker.poll(wait=True)
        states |= {result.job_id: result.state for result in report.results}
        lost += report.lost_slots
        engine.step()
    assert states == {promote.job_id: FAILED}
    assert lost == [(0, 6, 8)]
    engine.worker.close()


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
    assert host_tier(engine.worker).pools.advance()[0] == (0,)
    assert max(len(arena_segments(group.memory.arena)) for group in engine.groups) <= 1


def test_closing_stops_every_allocation_before_it_waits_for_the_first(monkeypatch, caplog):
    real, is_closing = host_arena.pinned_zeros, threading.Event()
    stopped: list[object] = []

    def allocate(struct):
        is_closing.wait(60)
        until_s = time.monotonic() + 30
        while len(stopped) < 6 and time.monotonic() < until_s:
            time.sleep(0.001)
        return real(struct)

    monkeypatch.setattr(host_arena, "pinned_zeros", allocate)
    monkeypatch.setattr(host_arena, "_MAX_WAIT_S", 20.0)
    engine = Engine(wait=False, swap_gb=0.001)
    for group in (*engine.groups, *swap_groups(engine.worker)):
        note_stop(group.memory.arena, stopped)
    is_closing.set()
    with caplog.at_level(logging.ERROR):
        engine.worker.close()
    assert len(stopped) == 6
    assert caplog.messages == []


def note_stop(arena, stopped):
    """Has an arena added to this list when it is told to stop its allocation."""
    stop = arena.stop_growing

    def noted():
        stop()
        stopped.append(arena)

    arena.stop_growing = noted


def test_direct_copies_of_all_page_groups_take_two_blocks_of_hbm():
    engine = Engine()
    assert engine.worker.hbm_nbytes == 2 * engine.layout.block_nbytes


@pytest.mark.parametrize("settings", [{"save_path": "fused"}, {"load_path": "fused"}])
def test_fused_copies_are_refused_in_one_line(settings):
    with pytest.raises(
        ConfigError, match="pages of 3 shapes or dtypes; fused copies support one: set direct or staged"
    ):
        Engine(**settings)
