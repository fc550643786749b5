"""Both copy paths against the slow reference, bit for bit, in all dtypes, on one device and on eight."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.caches import DTYPES, pointers, random_caches, random_like
from tpu_offload.kernels import BlockMoves, DirectCopier, Phase, StagedCopier, TransferSpec, reference
from tpu_offload.memory import pinned_zeros
from tpu_offload.types import Direction

SEGMENT_BLOCKS = 10
CAPACITY = 6


class Store:
    """Segments in a dict."""

    def __init__(self, **segments):
        self.segments = {int(k[1:]): v for k, v in segments.items()}

    def segment(self, segment_id):
        return self.segments[segment_id]

    def replace(self, segment_id, segment):
        self.segments[segment_id] = segment


def moves(block_ids, host_block_ids, job_ids=None):
    job_ids = [7] * len(block_ids) if job_ids is None else job_ids
    return BlockMoves(np.array(job_ids, np.int64), np.array(block_ids, np.int32), np.array(host_block_ids, np.int32))


class Setup:
    def __init__(self, path, dtype="bfloat16", num_devices=1, seed=0, num_stripes=2):
        rng = np.random.default_rng(seed)
        self.caches = random_caches(rng, dtype=dtype, num_devices=num_devices)
        self.spec = TransferSpec.from_caches(
            self.caches, segment_blocks=SEGMENT_BLOCKS, capacity=CAPACITY, num_stripes=num_stripes
        )
        self.store = Store(s0=[random_like(rng, struct) for struct in self.spec.segment_structs()])
        self.copier: Any
        if path == "direct":
            self.copier = DirectCopier(self.spec, self.store)
        else:
            self.copier = StagedCopier(self.spec, self.store, allocate=pinned_zeros)

    def save(self, piece):
        flight = self.copier.save(0, piece, self.caches)
        if flight.phase is Phase.TRANSIT:
            self.copier.resume_save(flight)
        return self.finish(flight)

    def load(self, piece, live=None):
        flight, self.caches = self.copier.load(0, piece, self.caches)
        if flight.phase is Phase.TRANSIT:
            self.caches = self.copier.resume_load(flight, piece if live is None else live, self.caches)
        return self.finish(flight)

    def finish(self, flight):
        assert flight.phase is Phase.COPYING
        token = int(flight.waiting_on)
        self.copier.release(flight)
        return token

    def segment_bytes(self):
        # A uint8 carrier has the bytes of the float8 it carries.
        return np.concatenate([reference.as_bytes(stripe) for stripe in self.store.segment(0)], axis=1)

    def cache_bytes(self):
        return [reference.as_bytes(cache) for cache in self.caches]


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_bits_survive_and_nothing_else_changes(path, dtype, num_devices):
    setup = Setup(path, dtype, num_devices)
    for block_ids, places in (([3, 0, 11, 5], [9, 2, 0, 4]), ([7], [1])):
        expected = reference.save(setup.segment_bytes(), setup.cache_bytes(), block_ids, places)
        caches_before = setup.cache_bytes()
        assert [setup.save(p) for p in setup.copier.split(moves(block_ids, places))] == (
            [len(block_ids)] if path == "direct" or len(block_ids) == 1 else [4]
        )
        np.testing.assert_array_equal(setup.segment_bytes(), expected)
        for cache, before in zip(setup.cache_bytes(), caches_before, strict=True):
            np.testing.assert_array_equal(cache, before)
    # Into other blocks than they came from, so that a load that does nothing is seen.
    block_ids, places = [1, 2, 10], [9, 1, 0]
    expected_caches = reference.load(setup.cache_bytes(), setup.segment_bytes(), block_ids, places)
    segment_before = setup.segment_bytes()
    for piece in setup.copier.split(moves(block_ids, places)):
        assert setup.load(piece) == len(piece)
    for cache, expected in zip(setup.cache_bytes(), expected_caches, strict=True):
        np.testing.assert_array_equal(cache, expected)
    np.testing.assert_array_equal(setup.segment_bytes(), segment_before)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_carried_as_bytes_on_cpu_only(dtype):
    setup = Setup("direct", dtype)
    assert setup.spec.carrier == np.uint8
    assert setup.store.segment(0)[0].dtype == np.uint8
    assert setup.caches[0].dtype == np.dtype(dtype)
    setup.load(moves([0], [1]))
    assert setup.caches[0].dtype == np.dtype(dtype)
    assert Setup("direct", "bfloat16").spec.carrier == np.dtype("bfloat16")


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_segment_and_caches_are_updated_in_place(path, num_devices):
    setup = Setup(path, num_devices=num_devices)
    segment_at = [pointers(stripe) for stripe in setup.store.segment(0)]
    caches_at = [pointers(cache) for cache in setup.caches]
    for n in (1, 2, 1):
        setup.save(moves(range(n), range(n)))
        setup.load(moves(range(n), range(n)))
    assert [pointers(stripe) for stripe in setup.store.segment(0)] == segment_at
    assert [pointers(cache) for cache in setup.caches] == caches_at


def test_direct_path_compiles_one_program_each_way_for_every_size(compiles):
    setup = Setup("direct")
    del compiles[:]
    setup.copier.compile()
    assert len(compiles) == 2
    for n in range(1, CAPACITY + 1):
        assert setup.save(moves(range(n), range(n))) == n
        assert setup.load(moves(range(n), range(n))) == n
    assert len(compiles) == 2


def test_staged_path_compiles_four_programs_a_bucket(compiles):
    setup = Setup("staged")
    for struct in setup.spec.segment_structs():
        pinned_zeros(struct)
    del compiles[:]
    setup.copier.compile()
    assert len(compiles) == 4 * 3  # buckets 1, 2, 4
    for n in range(1, CAPACITY + 1):
        for piece in setup.copier.split(moves(range(n), range(n))):
            setup.save(piece)
            setup.load(piece)
    assert len(compiles) == 4 * 3


def test_programs_are_compiled_at_first_use_otherwise(compiles):
    setup = Setup("direct")
    del compiles[:]
    setup.save(moves([1], [2]))
    assert len(compiles) == 1


def test_direct_split_keeps_to_the_capacity():
    setup = Setup("direct")
    pieces = setup.copier.split(moves(range(CAPACITY + 1), range(CAPACITY + 1)))
    assert [len(piece) for piece in pieces] == [CAPACITY, 1]
    assert pieces[1].block_ids.tolist() == [CAPACITY]


def test_cancelled_rows_of_a_staged_load_are_not_written():
    setup = Setup("staged")
    piece = moves([4, 5, 6, 7], [0, 1, 2, 3], job_ids=[1, 2, 1, 3])
    live = piece.take(np.array([False, True, False, True]))
    expected = reference.load(setup.cache_bytes(), setup.segment_bytes(), [5, 7], [1, 3])
    assert setup.load(piece, live=live) == 2
    for cache, wanted in zip(setup.cache_bytes(), expected, strict=True):
        np.testing.assert_array_equal(cache, wanted)


def test_staged_loads_use_host_staging_again():
    setup = Setup("staged")
    flight, _ = setup.copier.load(0, moves([0, 1], [2, 3]), setup.caches)
    first_at = pointers(flight.host_staging)
    setup.caches = setup.copier.resume_load(flight, flight.moves, setup.caches)
    setup.finish(flight)
    flight, _ = setup.copier.load(0, moves([2, 3], [4, 5]), setup.caches)
    assert pointers(flight.host_staging) == first_at
    other, _ = setup.copier.load(0, moves([4, 5], [6, 7]), setup.caches)
    assert pointers(other.host_staging) != first_at


def test_staged_loads_in_flight_together_do_not_mix():
    setup = Setup("staged")
    expected = reference.load(setup.cache_bytes(), setup.segment_bytes(), [0, 1, 2, 3], [5, 6, 7, 8])
    flights = [setup.copier.load(0, moves(b, h), setup.caches)[0] for b, h in (([0, 1], [5, 6]), ([2, 3], [7, 8]))]
    for flight in reversed(flights):
        assert flight.direction is Direction.LOAD
        setup.caches = setup.copier.resume_load(flight, flight.moves, setup.caches)
        setup.finish(flight)
    for cache, wanted in zip(setup.cache_bytes(), expected, strict=True):
        np.testing.assert_array_equal(cache, wanted)


def test_kept_host_staging_is_bounded_by_the_budget():
    setup = Setup("staged")
    flights = [setup.copier.load(0, moves([i], [i]), setup.caches)[0] for i in range(CAPACITY + 3)]
    for flight in flights:
        setup.copier.release(flight)
    assert setup.copier._free_blocks == CAPACITY


def test_save_in_program_order_sees_the_step_before_and_not_the_one_after():
    """Rule 4: the engine may write the blocks as soon as the save is dispatched."""
    setup = Setup("direct", "int8")
    setup.copier.compile()
    zero = np.zeros((400, 400), np.float32)

    def late(caches, zero):
        """A forward pass that takes a while and adds one to every element."""
        zero = jax.lax.fori_loop(0, 100, lambda i, y: y @ zero, zero)
        return [cache + (1 + zero[0, 0]).astype(cache.dtype) for cache in caches]

    step = jax.jit(late, donate_argnums=0).lower(setup.caches, zero).compile()
    wanted = [cache + np.uint8(1) for cache in setup.cache_bytes()]
    setup.caches = [jax.numpy.copy(cache) for cache in setup.caches]  # the numpy views above keep the old ones
    expected = reference.save(setup.segment_bytes(), wanted, [1, 2], [3, 4])
    setup.caches = step(setup.caches, zero)
    flight = setup.copier.save(0, moves([1, 2], [3, 4]), setup.caches)
    setup.caches = step(setup.caches, zero)
    assert not flight.waiting_on.is_ready()  # all three were dispatched before the first had run
    assert setup.finish(flight) == 2
    np.testing.assert_array_equal(setup.segment_bytes(), expected)
