"""What the measuring code makes of times, and that its methods move what they say."""

import dataclasses

import jax
import numpy as np
import pytest

from tpu_offload import OffloadConfig
from tpu_offload.cli.transfer_methods import BusCopies, Geometry, Memcpy, ModelStep, PeerCopies
from tpu_offload.cli.transfer_rates import (
    CopyRates,
    Figures,
    Spread,
    TransferBench,
    measure_copy_rates,
    rank,
)
from tpu_offload.config import CopyPath
from tpu_offload.errors import TransferError
from tpu_offload.types import Direction

DIRECT, STAGED = CopyPath.DIRECT, CopyPath.STAGED
SAVE, LOAD = Direction.SAVE, Direction.LOAD
SMALL = Geometry(2, (4, 8, 2, 8))


def test_spread():
    spread = Spread.of([5.0, 1.0, 3.0])
    assert (spread.median, spread.values) == (3.0, (5.0, 1.0, 3.0))
    assert 1.0 < spread.p10 < 3.0 < spread.p90 < 5.0


def figures(path, seconds, delay_s, direction=SAVE, num_blocks=1):
    spread = Spread.of([seconds])
    delay = None if delay_s is None else Spread.of([delay_s])
    return Figures(
        path, direction, num_blocks, nbytes=1, num_rounds=1, seconds=spread, gb_per_s=spread, dispatch_s=spread,
        limit_gb_per_s=spread, peer_gb_per_s=None, of_limit=spread, of_peer=None, delay_s=delay, step_s=delay,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("direct", "staged", "best"),
    [
        ((1e-3, 2e-3), (9e-3, 1e-3), STAGED),  # the model's time first
        ((9e-3, 1.05e-3), (1e-3, 1e-3), STAGED),  # alike: the transfer's own
        ((1.04e-3, 1e-3), (1e-3, 1e-3), DIRECT),  # alike in both: direct, which needs no HBM
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
    """A tenth of the delay of small jobs is worth as much as a tenth of that of large ones."""
    sizes = [(1, 1e-3, 1e-4), (64, 1.0, 2.0), (128, 1.0, 2.0)]
    both = [figures(DIRECT, 1.0, direct, num_blocks=n) for n, direct, _ in sizes]
    both += [figures(STAGED, 1.0, staged, num_blocks=n) for n, _, staged in sizes]
    assert rank(both, SAVE) == [STAGED, DIRECT]


def filled(num_blocks=6):
    """Caches whose block `i` of layer `l` is full of `10 * l + i`."""
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
    assert all(p == pointers[0] for p in pointers), "a fresh buffer: that is no limit"


def test_memcpy_walks():
    memcpy = Memcpy(nbytes=10, job_nbytes=3)
    memcpy._source[:] = range(10)
    for _ in range(2):
        memcpy.dispatch(SAVE, [], [0])
    np.testing.assert_array_equal(memcpy._target, [0, 1, 2, 3, 4, 5, 1, 1, 1, 1])
    memcpy._source[:] += 10
    for _ in range(2):
        memcpy.dispatch(SAVE, [], [0])
    np.testing.assert_array_equal(memcpy._target, [10, 11, 12, 3, 4, 5, 16, 17, 18, 1])


def test_a_step_reads_and_writes_the_caches():
    caches = filled()
    step = ModelStep(caches, target_s=1e-3)
    caches = step.calibrate(caches)
    old = [cache.unsafe_buffer_pointer() for cache in caches]
    caches = step(caches)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == old
    assert first_values(caches)[0][1:] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("direction", [SAVE, LOAD])
def test_one_direction_alone(small_buffers, direction):
    bench = TransferBench(SMALL, sizes=[2], paths=[DIRECT], directions=[direction])
    (one,) = bench.measure(2, seconds=60, max_rounds=2)
    assert (one.direction, one.num_rounds) == (direction, 2)
    assert one.of_peer.median > 0
    bench.close()


def test_rounds_end_with_the_time(small_buffers):
    ticks = iter(range(100))
    bench = TransferBench(SMALL, sizes=[1], paths=[DIRECT], with_peer=False)
    (save, _) = bench.measure(1, seconds=5, clock=lambda: next(ticks))
    assert save.num_rounds == 4
    bench.close()


@pytest.mark.parametrize("paths", [{}, {"save_path": "staged"}, {"load_path": "staged"}])
def test_rates_of_an_engine(paths):
    """What replay shows: with the engine's own settings, whatever they are."""
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
