"""The copies of request swap on real arrays: bit for bit, in program order, whatever goes wrong."""

import jax
import numpy as np
import pytest

from tests.caches import DTYPES, random_caches
from tests.inside.worker import swap_groups
from tests.jobs import copy_job
from tests.worker.engine import FAILED, FINISHED, EngineBase, Poisoned, broken, ending_with, wait_until_rebuilt
from tpu_offload import CopyJob, CopyPart, HostStore, JobKind, KVLayout, OffloadConfig, OffloadWorker, StepPlan
from tpu_offload.errors import TransferError
from tpu_offload.memory import host_arena
from tpu_offload.types import Direction

NUM_BLOCKS = (12, 7)  # of the layers with full attention, and of those with a window
POOL, TIER = HostStore.SWAP_POOL, HostStore.HOST_TIER


class Engine(EngineBase):
    """With a swap pool."""

    def __init__(
        self, *, hybrid=False, groups=(), dtype="bfloat16", num_devices=1, tier=False, pool_blocks=10, **settings
    ):
        rng = np.random.default_rng(3)
        caches = random_caches(rng, dtype=dtype, num_devices=num_devices)
        self.windows: tuple[int, ...] = ()
        if hybrid:
            few = random_caches(rng, dtype=dtype, num_devices=num_devices, num_blocks=NUM_BLOCKS[1], num_layers=2)
            caches, self.windows = [caches[0], few[0], caches[1], few[1]], (0, 8, 0, 8)
        layout = KVLayout.from_caches(caches, block_size=4, windows=self.windows, groups=groups)
        counted = layout.groups[:1] if groups else layout.groups  # of groups that share arrays the first
        self.hbm_nbytes = sum(
            num_blocks * layout.group_nbytes_per_host(group)
            for num_blocks, group in zip(NUM_BLOCKS, counted, strict=False)
        )
        settings = {
            "swap_gb": self.hbm_nbytes * pool_blocks / 12 / 2**30,
            # Segments of three blocks of the first group.
            "host_segment_gb": 3.5 * layout.group_nbytes_per_host(layout.groups[0]) / 2**30,
            "num_cpu_chunks": 8 if tier else 0,
        } | settings
        super().__init__(rng, caches, layout, settings)
        self.worker.wait_until_allocated()
        self.report = self.worker.poll()
        self.groups = swap_groups(self.worker)

    def job(self, kind, *parts):
        job_id = self.new_job_id()
        copied = [
            CopyPart(group_id=group, store=store, block_ids=tuple(blocks), host_block_ids=tuple(places))
            for group, store, blocks, places in parts
        ]
        return CopyJob(job_id=job_id, kind=kind, request_id=f"r{job_id}", parts=tuple(copied))

    def out(self, *parts):
        return self.job(JobKind.SWAP_OUT, *parts)

    def back(self, *parts):
        return self.job(JobKind.SWAP_IN, *parts)

    def step(self, *, outs=(), ins=(), saves=(), loads=(), scribble=False):
        plan = StepPlan(step_id=0, jobs=(*outs, *loads, *ins, *saves))
        self.caches = self.worker.begin_step(plan, self.caches)
        if scribble:
            self.scribble()
        self.worker.end_step(plan, self.caches)

    def pages(self, group, blocks):
        """The bytes that those blocks should hold now."""
        layers = self.layout.groups[group].layer_ids
        return [self.expected[layer][list(blocks)].copy() for layer in layers]

    def expect(self, group, blocks, pages):
        for layer, page in zip(self.layout.groups[group].layer_ids, pages, strict=True):
            self.expected[layer][list(blocks)] = page


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(dtype, num_devices):
    engine = Engine(dtype=dtype, num_devices=num_devices)
    blocks, places = [7, 0, 11, 3, 5], [9, 2, 3, 0, 8]  # over several segments
    pages = engine.pages(0, blocks)
    engine.step(outs=[engine.out((0, POOL, blocks, places))], scribble=True)
    assert engine.states() == {1: FINISHED}
    engine.check_caches()
    targets = [1, 2, 4, 6, 10]
    engine.step(ins=[engine.back((0, POOL, targets, places))])
    engine.expect(0, targets, pages)
    assert engine.states() == {2: FINISHED}
    engine.check_caches()
    engine.worker.close()


def test_what_is_swapped_out_is_read_before_the_step_writes():
    """Out, back into other blocks and the forward pass that overwrites everything, in one step each."""
    engine = Engine()
    for _ in range(5):
        pages = engine.pages(0, [0, 1, 2])
        engine.step(outs=[engine.out((0, POOL, [0, 1, 2], [4, 5, 6]))], scribble=True)
        engine.step(ins=[engine.back((0, POOL, [8, 7, 6], [4, 5, 6]))])
        engine.expect(0, [8, 7, 6], pages)
        engine.check_caches()
    assert set(engine.states().values()) == {FINISHED}


def test_blocks_change_hands_within_a_step():
    """One request leaves, another comes back into the very same blocks."""
    engine = Engine()
    first = engine.pages(0, [0, 1])
    engine.step(outs=[engine.out((0, POOL, [0, 1], [0, 1]))], scribble=True)
    second = engine.pages(0, [0, 1])
    engine.step(
        outs=[engine.out((0, POOL, [0, 1], [2, 3]))], ins=[engine.back((0, POOL, [0, 1], [0, 1]))], scribble=False
    )
    engine.expect(0, [0, 1], first)
    engine.check_caches()
    engine.step(ins=[engine.back((0, POOL, [4, 5], [2, 3]))])
    engine.expect(0, [4, 5], second)
    engine.check_caches()


@pytest.mark.parametrize("num_devices", [1, 4])
def test_layer_groups_have_pools_of_their_own(num_devices):
    engine = Engine(hybrid=True, num_devices=num_devices)
    assert engine.report.num_swap_blocks == (10, 5)  # the same share of each
    full, window = engine.pages(0, [11, 4, 2]), engine.pages(1, [6, 0, 3])
    engine.step(outs=[engine.out((0, POOL, [11, 4, 2], [0, 1, 9]), (1, POOL, [6, 0, 3], [4, 1, 0]))], scribble=True)
    engine.step(ins=[engine.back((0, POOL, [1, 0, 3], [0, 1, 9]), (1, POOL, [5, 4, 1], [4, 1, 0]))])
    engine.expect(0, [1, 0, 3], full)
    engine.expect(1, [5, 4, 1], window)  # in the order of its places
    assert set(engine.states().values()) == {FINISHED}
    engine.check_caches()


@pytest.mark.parametrize("num_devices", [1, 4])
def test_layer_groups_that_share_arrays(num_devices):
    """A block of each is copied as a row of all arrays, from and to the group's own pool."""
    groups = [(0, (0, 1, 2)), (8, (0, 1, 2)), (8, (0, 1, 2))]
    engine = Engine(groups=groups, num_devices=num_devices, swap_gb="auto")
    assert engine.report.num_swap_blocks == (8, 8, 8)  # together twice the 12 blocks of the KV cache
    full, first, second = engine.pages(0, [11, 4, 2]), engine.pages(1, [6, 0]), engine.pages(2, [3])
    outs = engine.out((0, POOL, [11, 4, 2], [0, 1, 7]), (1, POOL, [6, 0], [7, 0]), (2, POOL, [3], [0]))
    engine.step(outs=[outs], scribble=True)
    ins = engine.back((0, POOL, [1, 0, 3], [0, 1, 7]), (1, POOL, [5, 4], [7, 0]), (2, POOL, [9], [0]))
    engine.step(ins=[ins])
    engine.expect(0, [1, 0, 3], full)
    engine.expect(1, [5, 4], first)
    engine.expect(2, [9], second)
    assert set(engine.states().values()) == {FINISHED}
    engine.check_caches()


@pytest.mark.parametrize("load_path", ["direct", "staged"])
def test_a_request_comes_back_from_the_tier_and_the_pool(load_path):
    engine = Engine(tier=True, load_path=load_path)
    pages, own = engine.pages(0, [3, 4]), engine.pages(0, [9])
    engine.step(saves=[copy_job(100, JobKind.SAVE, (3, 4), (6, 1))])
    engine.step(outs=[engine.out((0, POOL, [9], [7]))], scribble=True)
    assert engine.states() == {100: FINISHED, 1: FINISHED}
    engine.step(ins=[engine.back((0, TIER, [0, 1], [6, 1]), (0, POOL, [2], [7]))])
    engine.expect(0, [0, 1], pages)
    engine.expect(0, [2], own)
    assert engine.states() == {2: FINISHED}
    engine.check_caches()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((0, POOL, [12], [0]), "block ids 12 to 12: expected 0 to 11"),
        ((0, POOL, [-1], [0]), "block ids -1 to -1"),
        ((0, POOL, [0], [10]), "host block ids 10 to 10: expected 0 to 9 in swap_pool"),
        ((1, POOL, [0], [0]), "a swap out of layer group 1 of swap_pool: this worker has no such memory"),
        ((-1, POOL, [0], [0]), "layer group -1"),
        (
            (0, TIER, [0], [0]),
            "a swap out of layer group 0 of host_tier: this worker has no such memory, or only reads it",
        ),
    ],
)
def test_what_cannot_be_fails_alone(part, message):
    engine = Engine(tier=True)
    engine.step(outs=[engine.out(part), engine.out((0, POOL, [1], [1]))])
    results = engine.drain()
    assert results[1].state is FAILED
    assert message in results[1].error
    assert results[2].state is FINISHED
    engine.check_caches()


def test_a_copy_that_raises_fails_its_job_and_no_other():
    engine = Engine()
    copier = engine.groups[0].copiers[Direction.SAVE]
    copier.save = broken(RuntimeError("INTERNAL: one\ntwo"))
    engine.step(outs=[engine.out((0, POOL, [0], [0]))])
    del copier.save
    engine.step(outs=[engine.out((0, POOL, [1], [1]))])
    results = engine.drain()
    assert (results[1].state, results[1].error) == (FAILED, "RuntimeError: INTERNAL: one")
    assert results[2].state is FINISHED


@pytest.mark.parametrize("when", ["dispatch", "device"])
def test_a_lost_segment_is_told_and_its_contents_are_never_given(when, monkeypatch):
    monkeypatch.setattr(host_arena, "_rebuild", lambda *args: None)
    engine = Engine()
    engine.step(outs=[engine.out((0, POOL, [0, 1], [0, 4]))])
    assert engine.states() == {1: FINISHED}
    copier = engine.groups[0].copiers[Direction.SAVE]
    if when == "dispatch":
        copier.save = broken(RuntimeError("gone"), takes=engine.groups[0].memory.arena)
    else:
        copier.save = ending_with(copier.save, Poisoned())
    engine.step(outs=[engine.out((0, POOL, [2], [1]))])
    report = engine.worker.poll(wait=True)
    assert [result.state for result in report.results] == [FAILED]
    # 10 blocks in segments of 3: the first has 0 to 2
    assert report.lost_swap_blocks == ((0, 0, 3),)
    engine.step(ins=[engine.back((0, POOL, [5], [0])), engine.back((0, POOL, [6], [4]))])
    results = engine.drain()
    assert "segment 0 of swap_pool was lost, or never written: host block 0 is empty" in results[3].error
    assert results[4].state is FINISHED
    engine.expect(0, [6], engine.pages(0, [1]))
    engine.check_caches()


def test_a_lost_segment_comes_back_empty_and_works_again():
    engine = Engine()
    copier = engine.groups[0].copiers[Direction.SAVE]
    copier.save = broken(RuntimeError("gone"), takes=engine.groups[0].memory.arena)
    engine.step(outs=[engine.out((0, POOL, [2], [1]))])
    assert engine.states() == {1: FAILED}
    del copier.save
    wait_until_rebuilt(engine.groups[0].memory.arena, 0)
    pages = engine.pages(0, [3])
    engine.step(outs=[engine.out((0, POOL, [3], [2]))])
    engine.step(ins=[engine.back((0, POOL, [4], [2])), engine.back((0, POOL, [5], [0]))])
    engine.expect(0, [4], pages)
    results = engine.drain()
    assert [results[i].state for i in (2, 3, 4)] == [FINISHED, FINISHED, FAILED]  # place 0 holds zeros
    engine.check_caches()


def test_a_copy_back_that_takes_the_caches_is_the_one_error_that_leaves():
    engine = Engine()
    engine.step(outs=[engine.out((0, POOL, [0], [0]))])
    engine.groups[0].copiers[Direction.LOAD].load = broken(RuntimeError("gone"), takes="caches")
    with pytest.raises(TransferError, match="took the KV caches with it"):
        engine.step(ins=[engine.back((0, POOL, [1], [0]))])


def test_a_copy_that_does_less_than_asked_has_failed():
    engine = Engine()
    copier = engine.groups[0].copiers[Direction.SAVE]
    copier.save = ending_with(copier.save, jax.numpy.int32(1))
    engine.step(outs=[engine.out((0, POOL, [0, 1], [0, 1]))])
    assert "the device copied 1 of 2 blocks" in engine.drain()[1].error


def test_a_repeated_job_is_ignored(caplog):
    engine = Engine()
    job = engine.out((0, POOL, [0], [0]))
    engine.step(outs=[job, job])
    assert engine.states() == {1: FINISHED}
    assert "the duplicate is ignored" in caplog.text


def test_some_copies_are_measured():
    """Not the first, which may compile; then a few, then every 16th, of each direction."""
    engine = Engine()
    measured: dict[Direction, list[bool]] = {Direction.SAVE: [], Direction.LOAD: []}
    for _ in range(40):
        jobs = engine.out((0, POOL, [0], [0])), engine.back((0, POOL, [1], [0]))
        engine.step(outs=jobs[:1], ins=jobs[1:])
        results = engine.drain()
        for job in jobs:
            measured[job.direction].append(results[job.job_id].copy_s > 0)
    for which in measured.values():
        assert [i for i, was in enumerate(which) if was] == [1, 2, 3, 4, 16, 32]


def test_a_closed_worker_has_no_flights():
    engine = Engine()
    engine.step(outs=[engine.out((0, POOL, [0], [0]))])
    engine.worker.close()
    assert not engine.worker.has_flights
    assert engine.worker.poll().results == ()


def test_auto_is_twice_the_kv_cache():
    engine = Engine(hybrid=True, swap_gb="auto")
    assert engine.report.num_swap_blocks == tuple(2 * num_blocks for num_blocks in NUM_BLOCKS)


def test_a_pool_of_less_than_a_block_is_no_pool(caplog):
    caches = random_caches(np.random.default_rng(0))
    layout = KVLayout.from_caches(caches, block_size=4)
    worker = OffloadWorker(OffloadConfig.create(num_cpu_chunks=0, swap_gb=1e-9), layout, caches, available=2**30)
    assert caplog.text.count("holds less than one block per layer group") == 1
    assert worker.poll().num_swap_blocks == ()
    job = CopyJob(
        job_id=1,
        kind=JobKind.SWAP_OUT,
        request_id="r",
        parts=(CopyPart(group_id=0, store=POOL, block_ids=(0,), host_block_ids=(0,)),),
    )
    worker.begin_step(StepPlan(step_id=0, jobs=(job,)), caches)
    (result,) = worker.poll().results
    assert "this worker has no such memory" in result.error


def test_the_pool_takes_what_the_host_tier_leaves(caplog):
    rng = np.random.default_rng(0)
    caches = random_caches(rng)
    layout = KVLayout.from_caches(caches, block_size=4)
    nbytes = layout.block_nbytes_per_host
    config = OffloadConfig.create(
        num_cpu_chunks=10,
        host_memory_fraction=1.0,
        swap_gb=20 * nbytes / 2**30,
        swap_safety=0.5,
        skip_jax_precompile=True,
    )
    worker = OffloadWorker(config, layout, caches, available=18 * nbytes)
    worker.wait_until_allocated()
    report = worker.poll()
    assert (report.num_host_slots, report.num_swap_blocks) == ((10,), (4,))  # half of 18 - 10
    assert caplog.text.count("the swap pool is cut") == 1
    worker.close()


def test_hbm_of_the_copies_is_two_blocks_of_the_largest_group():
    engine = Engine(hybrid=True)
    assert engine.worker.hbm_nbytes == 2 * max(group.block_nbytes for group in engine.layout.groups)
    with_tier = Engine(tier=True)
    assert with_tier.worker.hbm_nbytes == 4 * with_tier.layout.block_nbytes
