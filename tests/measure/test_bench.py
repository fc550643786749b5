"""The figures are computed correctly, and the methods really move the blocks."""

import dataclasses

import jax
import numpy as np
import pytest

from tpu_offload import OffloadConfig
from tpu_offload.errors import TransferError
from tpu_offload.kernels import reference
from tpu_offload.measure import PATHS, CopyRates, Figures, Geometry, Spread, TransferBench, measure_copy_rates
from tpu_offload.measure.baselines import BusCopies, Memcpy, PeerCopies, ProgramCopies
from tpu_offload.measure.figures import rank
from tpu_offload.measure.model_step import ModelStep
from tpu_offload.measure.worker_copies import WorkerCopies
from tpu_offload.types import Direction

DIRECT, STAGED, FUSED = PATHS
SAVE, LOAD = Direction.SAVE, Direction.LOAD
SMALL = Geometry(2, (4, 8, 2, 8))


def test_spread():
    spread = Spread.of([5.0, 1.0, 3.0])
    assert (spread.median, spread.values) == (3.0, (5.0, 1.0, 3.0))
    assert 1.0 < spread.p10 < 3.0 < spread.p90 < 5.0


def figures(path, seconds, delay_s, direction=SAVE, num_blocks=1):
    """Figures; `seconds` is the job's time alone or, with a delay, beside the model."""
    spread = Spread.of([seconds])
    alone = None if path is FUSED else spread
    delay, reported = (None, None) if delay_s is None else (Spread.of([delay_s]), spread)
    return Figures(
        path, direction, num_blocks, nbytes=1, num_fused_blocks=0, num_rounds=1, seconds=alone, gb_per_s=alone,
        dispatch_s=alone, limit_gb_per_s=spread, peer_gb_per_s=None, of_limit=alone, of_peer=None,
        program_s=None, of_program=None, empty_s=None, of_floor=None, delay_s=delay, reported_s=reported, step_s=delay,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("direct", "staged", "best"),
    [
        ((1e-3, 2e-3), (9e-3, 1e-3), STAGED),  # the model's delay counts first
        ((9e-3, 1.05e-3), (1e-3, 1e-3), STAGED),  # equal delays: the transfer's own time
        ((1.04e-3, 1e-3), (1e-3, 1e-3), DIRECT),  # equal in both: direct, which needs no HBM
        ((2e-3, -1e-4), (1e-3, 4e-5), STAGED),  # both are noise
        ((1e-3, None), (2e-3, None), DIRECT),
        ((2e-3, None), (1e-3, None), STAGED),
    ],
)
def test_rank(direct, staged, best):
    other = [figures(DIRECT, 9.0, 9.0, LOAD), figures(STAGED, 1.0, 1.0, LOAD)]
    ranking = rank([figures(STAGED, *staged), figures(DIRECT, *direct), *other], SAVE)
    assert ranking[0] is best
    assert set(ranking) == {DIRECT, STAGED}


def test_rank_weighs_the_job_sizes_alike():
    """A tenth of the delay of small jobs counts as much as a tenth of the delay of large ones."""
    sizes = [(1, 1e-3, 1e-4), (64, 1.0, 2.0), (128, 1.0, 2.0)]
    both = [figures(DIRECT, 1.0, direct, num_blocks=n) for n, direct, _ in sizes]
    both += [figures(STAGED, 1.0, staged, num_blocks=n) for n, _, staged in sizes]
    assert rank(both, SAVE) == [STAGED, DIRECT]


def test_rank_of_fused_is_by_what_it_costs_the_model():
    all_ = [figures(DIRECT, 5e-3, 2e-3), figures(STAGED, 9e-3, 1e-3), figures(FUSED, 6e-3, 1e-4)]
    assert rank(all_, SAVE) == [FUSED, STAGED, DIRECT]
    assert rank(all_, SAVE, without=[FUSED]) == [STAGED, DIRECT]
    assert rank(all_, LOAD) == []


def filled(num_blocks=6):
    """Caches in which block `i` of layer `l` is filled with `10 * l + i`."""
    return [
        jax.device_put(cache.at[...].set(np.arange(num_blocks).reshape(-1, 1, 1, 1, 1) + 10 * i), cache.sharding)
        for i, cache in enumerate(SMALL.make_caches(num_blocks))
    ]


def first_values(caches):
    return [np.asarray(cache)[:, 0, 0, 0, 0].astype(int).tolist() for cache in caches]


def test_the_peer_really_copies():
    caches = filled()
    peer = PeerCopies(caches, sizes=[2])
    peer.wait_until_compiled()
    caches = peer.finish(peer.dispatch(SAVE, caches, [4, 1]))
    caches = peer.finish(peer.dispatch(LOAD, caches, [0, 5]))
    assert first_values(caches) == [[4, 1, 2, 3, 4, 1], [14, 11, 12, 13, 14, 11]]


def test_the_bus_limit_copies_in_place_both_ways():
    caches = filled()
    bus = BusCopies(caches, block_nbytes_per_device=SMALL.block_nbytes)
    pointers = []
    for direction in (SAVE, LOAD, SAVE, LOAD):
        bus.finish(bus.dispatch(direction, caches, [0, 1]))
        (buffers,) = bus._buffers.values()
        pointers.append({kind: array.unsafe_buffer_pointer() for kind, array in buffers.items()})
        assert {kind: array.sharding.memory_kind for kind, array in buffers.items()} == {k: k for k in buffers}
    assert buffers["device"].nbytes >= 2 * SMALL.block_nbytes
    assert all(p == pointers[0] for p in pointers), "a new buffer was allocated, so it is not the limit"


def test_memcpy_walks():
    memcpy = Memcpy(nbytes=10, job_nbytes=3)
    memcpy.source[:] = range(10)
    for _ in range(2):
        memcpy.dispatch(SAVE, [], [0])
    np.testing.assert_array_equal(memcpy.target, [0, 1, 2, 3, 4, 5, 1, 1, 1, 1])
    memcpy.source[:] += 10
    for _ in range(2):
        memcpy.dispatch(SAVE, [], [0])
    np.testing.assert_array_equal(memcpy.target, [10, 11, 12, 3, 4, 5, 16, 17, 18, 1])


def test_the_program_by_itself_moves_the_blocks_and_an_empty_one_none():
    caches = filled()
    config = OffloadConfig.create(save_path="direct", load_path="direct", num_staging_blocks=2, num_cpu_chunks=6)
    worker = WorkerCopies(config, caches)
    program, empty = (ProgramCopies(worker.copiers[0], segment_blocks=n) for n in (4, 0))
    caches = program.finish(program.dispatch(SAVE, caches, [4, 2]))  # to 0 and 1
    caches = empty.finish(empty.dispatch(SAVE, caches, [1, 3]))
    caches = program.finish(program.dispatch(SAVE, caches, [5, 5]))  # to 2 and 3
    caches = program.finish(program.dispatch(LOAD, caches, [0, 1]))  # from 0 and 1 again
    caches = empty.finish(empty.dispatch(LOAD, caches, [2, 3]))
    assert first_values(caches) == [[4, 2, 2, 3, 4, 5], [14, 12, 12, 13, 14, 15]]
    worker.worker.close()


def test_the_program_by_itself_is_called_once_a_portion():
    num_blocks = 600  # a direct copy takes at most 512
    caches = filled(num_blocks)
    config = OffloadConfig.create(
        save_path="direct", load_path="direct", num_staging_blocks=2, num_cpu_chunks=num_blocks
    )
    worker = WorkerCopies(config, caches)
    program = ProgramCopies(worker.copiers[0], segment_blocks=num_blocks)
    caches = program.finish(program.dispatch(SAVE, caches, list(range(num_blocks))))
    caches = program.finish(program.dispatch(LOAD, caches, list(range(num_blocks))[::-1]))
    values = first_values(caches)[0]
    assert values == first_values(filled(num_blocks))[0][::-1]
    worker.worker.close()


def test_a_step_reads_and_writes_the_caches():
    caches = filled()
    step = ModelStep(caches, target_s=1e-3)
    for _ in range(3):
        old = [cache.unsafe_buffer_pointer() for cache in caches]
        caches, _ = step.dispatch(caches)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == old
    assert first_values(caches)[0][1:] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_takes_the_fused_copies_along(num_devices):
    """Every block ends up in the right place: copies that copy nothing would have good figures, too."""
    geometry = dataclasses.replace(SMALL, num_devices=num_devices)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((6, *geometry.page_shape)) for _ in range(geometry.num_layers)]
    caches = [
        jax.device_put(value.astype(cache.dtype), cache.sharding)
        for value, cache in zip(values, geometry.make_caches(6), strict=True)
    ]
    expected = [reference.as_bytes(cache) for cache in caches]
    config = OffloadConfig.create(
        save_path="fused", load_path="fused", num_staging_blocks=2, num_cpu_chunks=6, block_size_buckets=(1, 2)
    )
    copies = WorkerCopies(config, caches)
    step = ModelStep(caches, target_s=1e-4)
    step.compile_fused(copies.worker.fused_shapes(), sizes=[2])

    def run(plan):
        caches_in = copies.worker.begin_step(plan, caches, fuse=True)
        fused = copies.worker.fused_step()
        assert fused.inputs.num_saves + fused.inputs.num_loads == 2
        new_caches, outcome = step.dispatch(caches_in, fused)
        copies.worker.end_step(plan, new_caches, outcome)
        assert copies.poll(wait=True)
        return new_caches

    caches = run(copies.plan(SAVE, [4, 2]))
    copies._next_place = 0  # load what was saved
    caches = run(copies.plan(LOAD, [1, 5]))
    for cache, wanted in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(reference.as_bytes(cache)[1:], wanted[[4, 2, 3, 4, 2]])
    copies.worker.close()


@pytest.mark.parametrize("direction", [SAVE, LOAD])
def test_one_direction_alone(small_buffers, direction):
    bench = TransferBench(SMALL, sizes=[2], paths=[DIRECT], directions=[direction])
    (one,) = bench.measure(2, seconds=60, max_rounds=2)
    assert (one.direction, one.num_rounds) == (direction, 2)
    assert one.of_peer.median > 0
    assert one.program_s.median > 0
    assert one.of_program.median > 0
    assert one.empty_s.median > 0
    assert one.of_floor.median > one.of_limit.median, "more time for the same bytes"
    bench.close()


def test_larger_jobs_are_fused_in_part(small_buffers):
    """As in an engine that compiles its step for few blocks."""
    bench = TransferBench(SMALL, sizes=[2, 5], paths=[FUSED], with_peer=False, step_s=1e-4, max_fused_blocks=3)
    found = bench.measure(2, seconds=60, max_rounds=1) + bench.measure(5, seconds=60, max_rounds=1)
    assert not bench.failures
    assert [(f.direction, f.num_blocks, f.num_fused_blocks) for f in found] == [
        (SAVE, 2, 2), (LOAD, 2, 2), (SAVE, 5, 2), (LOAD, 5, 2),
    ]  # fmt: skip
    assert all(f.seconds is None and f.of_limit is None and f.delay_s and f.reported_s.median > 0 for f in found)
    bench.close()


def test_a_failed_path_leaves_the_others_alone(small_buffers, monkeypatch):
    """Even if it destroys the caches."""
    real = TransferBench._time_path

    def time_path(self, path, direction, block_ids):
        if (path, direction) == (STAGED, LOAD):
            for cache in self._caches:
                cache.delete()
            raise jax.errors.JaxRuntimeError("INTERNAL: halted\nmore")
        return real(self, path, direction, block_ids)

    monkeypatch.setattr(TransferBench, "_time_path", time_path)
    bench = TransferBench(SMALL, sizes=[2], paths=PATHS, with_peer=False, step_s=1e-4)
    found = bench.measure(2, seconds=60, max_rounds=2)
    (failure,) = bench.failures
    assert (failure.path, failure.direction, failure.error) == (STAGED, LOAD, "JaxRuntimeError: INTERNAL: halted")
    left = {(path, direction) for path in PATHS for direction in Direction} - {(STAGED, LOAD)}
    assert {(f.path, f.direction) for f in found} == left
    assert all(f.num_rounds == 2 for f in found)
    assert all((f.of_floor is not None) is (f.path is DIRECT) for f in found), "no other path has such a program"
    assert all((f.of_program is not None) is (f.path is DIRECT) for f in found)
    bench.close()


@pytest.mark.parametrize("fails", ["_lower_scatter", "finish"])
def test_the_peer_may_fail(small_buffers, monkeypatch, caplog, fails):
    """For example if the device has no memory for the gathered blocks."""
    monkeypatch.setattr(PeerCopies, fails, lambda *args: 1 / 0)
    bench = TransferBench(SMALL, sizes=[2], paths=[DIRECT])
    found = bench.measure(2, seconds=60, max_rounds=2)
    assert [(f.direction, f.num_rounds, f.of_peer) for f in found] == [(SAVE, 2, None), (LOAD, 2, None)]
    assert caplog.messages == ["the peer's method (one device_put per block) failed and is skipped: division by zero"]
    bench.close()


def test_a_step_that_does_not_compile_is_a_failure(small_buffers, monkeypatch):
    monkeypatch.setattr("tpu_offload.kernels.fused.FusedCopies._stage", lambda *args: 1 / 0)
    geometry = Geometry(3, (4, 8, 2, 8))  # of no other test: jax keeps what it has traced
    bench = TransferBench(geometry, sizes=[1], paths=[DIRECT, FUSED], with_peer=False, step_s=1e-4)
    (failure,) = bench.failures
    assert (failure.path, failure.direction, failure.error) == (FUSED, SAVE, "ZeroDivisionError: division by zero")
    found = bench.measure(1, seconds=60, max_rounds=1)
    assert {(f.path, f.direction) for f in found} == {(DIRECT, SAVE), (DIRECT, LOAD), (FUSED, LOAD)}
    bench.close()


def test_a_step_that_compiles_for_too_long_is_a_failure(small_buffers):
    bench = TransferBench(SMALL, sizes=[1], paths=[DIRECT, FUSED], with_peer=False, step_s=1e-4, compile_s=0)
    assert {f.error for f in bench.failures} <= {
        "the model step with 1 blocks did not compile in time; allow more seconds"
    }
    assert {f.path for f in bench.measure(1, seconds=60, max_rounds=1)} >= {DIRECT}
    bench.close()


def test_rounds_end_with_the_time(small_buffers):
    ticks = iter(range(100))
    bench = TransferBench(SMALL, sizes=[1], paths=[DIRECT], with_peer=False)
    (save, _) = bench.measure(1, seconds=5, clock=lambda: next(ticks))
    assert save.num_rounds == 4
    bench.close()


@pytest.mark.parametrize("paths", [{}, {"save_path": "staged"}, {"load_path": "staged"}, {"save_path": "fused"}])
def test_rates_of_an_engine(paths):
    """The rates that replay prints, measured with the engine's own settings."""
    offload = OffloadConfig.create(num_staging_blocks=5, blocks_per_chunk=2, host_gb=1, **paths)
    rates = measure_copy_rates(offload, SMALL, max_blocks=8, num_rounds=2)
    assert rates == CopyRates(5, rates.save_gb_per_s, rates.load_gb_per_s)
    assert min(rates.save_gb_per_s, rates.load_gb_per_s) > 0


def test_a_failed_copy_has_no_rate(monkeypatch):
    monkeypatch.setattr("tpu_offload.kernels.DirectCopier.load", lambda *args: 1 / 0)
    with pytest.raises(TransferError, match="a copy failed: ZeroDivisionError"):
        measure_copy_rates(OffloadConfig.create(), SMALL, max_blocks=2)


def test_geometry_counts_bytes_over_all_devices():
    geometry = dataclasses.replace(SMALL, num_devices=4)
    caches = geometry.make_caches(3)
    assert sum(cache.nbytes for cache in caches) == 3 * geometry.block_nbytes
    assert len(caches[0].sharding.device_set) == 4
