import gc
import logging
import threading
import time
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.caches import pointers
from tpu_offload.errors import TransferError
from tpu_offload.memory import HostArena, host_arena, pinned_zeros, plan_segments, plan_shared_segments

GB = 2**30


def struct(num_devices=1, blocks=4):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "model"), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct((blocks, 2, 4, 8, 6), np.dtype("bfloat16"), sharding=sharding)


def make_arena(num_segments=3, num_chunks=6, **kwargs):
    return HostArena([struct(**kwargs)], num_segments=num_segments, chunks_per_segment=2, num_chunks=num_chunks)


@given(st.integers(1, 10_000), st.integers(1, 3 * GB), st.floats(0.001, 8))
def test_segments_hold_all_chunks(num_chunks, chunk_nbytes, segment_gb):
    num_segments, per_segment = plan_segments(num_chunks, chunk_nbytes=chunk_nbytes, segment_gb=segment_gb)
    assert per_segment == 1 or per_segment * chunk_nbytes <= segment_gb * GB
    assert num_chunks <= num_segments * per_segment
    assert (num_segments - 1) * per_segment < num_chunks


def test_plan_of_segments():
    assert plan_segments(1024, chunk_nbytes=2**20, segment_gb=1.0) == (1, 1024)
    assert plan_segments(1025, chunk_nbytes=2**20, segment_gb=1.0) == (2, 513)
    assert plan_segments(3, chunk_nbytes=2 * GB, segment_gb=1.0) == (3, 1)
    assert plan_segments(0, chunk_nbytes=1, segment_gb=1.0)[0] == 0


@pytest.mark.parametrize("num_devices", [1, 8])
def test_zeros_are_pinned_sharded_and_donatable_in_place(num_devices):
    array = pinned_zeros(struct(num_devices))
    assert array.sharding == struct(num_devices).sharding
    assert array.sharding.memory_kind == "pinned_host"
    assert len(array.addressable_shards) == num_devices
    before = pointers(array)  # read before the values: a numpy view of an array keeps it from being donated
    assert len(set(before)) == num_devices
    add = jax.jit(
        lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:1] + 1, 0, 0),
        donate_argnums=0,
        out_shardings=array.sharding,
    )
    for _ in range(3):
        array = add(array)
        assert pointers(array) == before
    values = np.asarray(array).astype(np.float32)
    assert (values[0] == 3).all()
    assert not values[1:].any()


def test_memory_that_jax_could_share_is_never_used():
    for _ in range(20):
        zeros = host_arena.unshareable_zeros((3, 5), np.dtype("float32"))
        assert zeros.ctypes.data % 64
        assert zeros.shape == (3, 5)


def test_chunks_become_ready_in_the_background():
    arena = make_arena(num_chunks=5)
    arena.wait_until_allocated()
    assert arena.num_chunks_ready == 5  # the sixth slot is unused
    assert not arena.growing
    assert arena.segment(2)[0].shape[0] == 4
    arena.close()
    assert arena.num_chunks_ready == 0


def test_construction_does_not_wait_for_the_memory(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(host_arena, "pinned_zeros", lambda s: go_on.wait(10) and pinned_zeros(s))
    arena = make_arena()
    assert arena.growing
    assert arena.num_chunks_ready == 0
    with pytest.raises(TransferError, match=r"segment 0 \(chunks 0 to 1\) is not allocated; 0 chunks are ready"):
        arena.segment(0)
    go_on.set()
    arena.wait_until_allocated()
    assert arena.num_chunks_ready == 6
    arena.close()


@pytest.mark.parametrize("error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no\nmore")])
def test_failed_allocation_stops_growth_and_is_logged_once(monkeypatch, caplog, error):
    made: list[Any] = []

    def allocate(segment):
        if made:
            raise error
        made.append(1)
        return pinned_zeros(segment)

    monkeypatch.setattr(host_arena, "pinned_zeros", allocate)
    with caplog.at_level(logging.WARNING):
        arena = make_arena(num_segments=5, num_chunks=10)
        arena.wait_until_allocated()
    assert arena.num_chunks_ready == 2
    (record,) = caplog.records
    assert "segment 2 of 5 could not be allocated" in record.getMessage()
    assert "\n" not in record.getMessage()
    arena.segment(0)
    arena.close()


def test_without_a_thread_there_is_no_memory_and_no_error(monkeypatch, caplog):
    """As where memory ends: the engine goes on with what it has."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    arena = make_arena()
    arena.wait_until_allocated()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        arena.mark_lost(1)
        without = make_arena()
        without.wait_until_allocated()
        arena.grow(2)  # it has more: no thread is needed, and nothing has failed
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "host pool segment 1",
        "host pool: segment 1 could not be allocated again",
        "host pool: segment 1 of 3 could not be allocated",
    ]
    assert all("can't start new thread: allow this process more" in message for message in caplog.messages[1:])
    assert arena.can_free(1)
    with pytest.raises(TransferError, match="segment 1 was lost"):
        arena.segment(1)
    assert (without.num_chunks_ready, without.growing) == (0, False)
    without.close()
    arena.close()


def test_close_does_not_wait_forever(monkeypatch, caplog):
    started, go_on = threading.Event(), threading.Event()

    def allocate(segment):
        started.set()
        go_on.wait(30)
        return pinned_zeros(segment)

    monkeypatch.setattr(host_arena, "pinned_zeros", allocate)
    monkeypatch.setattr(host_arena, "_MAX_WAIT_S", 0.02)
    arena = make_arena()
    assert started.wait(10)
    arena.close()  # returns although the allocation has not
    assert caplog.messages == ["host pool: closed after 0.02 s; a segment is still being allocated"]
    go_on.set()
    arena.wait_until_allocated()


def test_close_stops_growing_at_once(monkeypatch):
    started, number = threading.Event(), []

    def allocate(segment):
        number.append(1)
        started.set()
        time.sleep(0.02)
        return pinned_zeros(segment)

    monkeypatch.setattr(host_arena, "pinned_zeros", allocate)
    arena = make_arena(num_segments=1000, num_chunks=2000)
    started.wait(10)
    arena.close()
    arena.close()
    assert len(number) < 100
    assert not arena.growing


def test_an_arena_that_is_not_closed_ends_its_thread(monkeypatch):
    def slow_zeros(struct):
        time.sleep(0.01)
        return pinned_zeros(struct)

    monkeypatch.setattr(host_arena, "pinned_zeros", slow_zeros)
    others = set(threading.enumerate())
    arena = make_arena(num_segments=1000, num_chunks=2000)
    (thread,) = set(threading.enumerate()) - others
    gone = weakref.ref(arena)
    del arena
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()


def test_a_lost_segment_is_zeroed_and_reported_once():
    arena = make_arena()
    arena.wait_until_allocated()
    arena.mark_lost(1)
    arena.mark_lost(1)
    assert arena.take_lost() == ((2, 4),)
    assert arena.take_lost() == ()
    while not arena.can_free(1):
        time.sleep(0.001)
    assert not np.asarray(arena.segment(1)[0]).any()
    arena.mark_lost(1)
    assert arena.take_lost() == ((2, 4),)
    arena.close()


def test_lost_segments_are_logged_and_refused(caplog, monkeypatch):
    monkeypatch.setattr(host_arena, "_rebuild", lambda *args: None)
    arena = make_arena()
    arena.wait_until_allocated()
    arena.mark_lost(1)
    arena.mark_lost(1)
    assert len([r for r in caplog.records if "is lost" in r.getMessage()]) == 1
    with pytest.raises(TransferError, match=r"segment 1 was lost.*chunks 2 to 3"):
        arena.segment(1)
    arena.segment(0)
    with pytest.raises(TransferError, match="not allocated"):
        arena.segment(3)
    arena.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no\nmore"), "RESOURCE_EXHAUSTED: no"),
    ],
)
def test_a_lost_segment_without_memory_stays_lost_and_the_others_serve(monkeypatch, caplog, error, said):
    def refuse(struct):
        raise error

    arena = make_arena()
    arena.wait_until_allocated()
    with monkeypatch.context() as without_memory:
        without_memory.setattr(host_arena, "pinned_zeros", refuse)
        arena.mark_lost(1)
        while not arena.can_free(1):
            time.sleep(0.001)
    assert arena.take_lost() == ((2, 4),)
    assert caplog.messages == [
        "host pool segment 1 (chunks 2 to 3) is lost",
        f"host pool: segment 1 could not be allocated again ({said}): its copies fail until the engine restarts",
    ]
    with pytest.raises(TransferError, match=r"segment 1 was lost.*chunks 2 to 3"):
        arena.segment(1)
    arena.mark_lost(1)  # another copy that used it has failed
    assert arena.take_lost() == ()
    assert len(caplog.messages) == 2
    arena.segment(0)
    arena.segment(2)
    arena.free_from(1)  # where two pools share memory: what is allocated in its place is not lost
    arena.grow(3)
    arena.wait_until_allocated()
    assert not np.asarray(arena.segment(1)[0]).any()
    arena.close()


@pytest.mark.parametrize("num_fitting", [0, 3, 4, 5, 9, 23, 24])
def test_hosts_with_less_memory_have_fewer_segments_of_the_same_size(num_fitting):
    num_segments, per_segment = plan_shared_segments(24, num_fitting, chunk_nbytes=GB, segment_gb=4.5)
    assert (num_segments, per_segment) == (num_fitting // 4, 4)


def test_a_last_segment_that_is_not_full_counts_where_all_fits():
    assert plan_shared_segments(25, 25, chunk_nbytes=GB, segment_gb=4.0) == (7, 4)
    assert plan_shared_segments(25, 24, chunk_nbytes=GB, segment_gb=4.0) == (6, 4)


def test_less_than_a_segment_is_logged_with_the_remedy(caplog):
    assert plan_shared_segments(24, 3, chunk_nbytes=GB, segment_gb=4.5) == (0, 4)
    (record,) = caplog.records
    assert "TPU_OFFLOAD_HOST_SEGMENT_GB to less than 3 on all" in record.getMessage()
