"""Windows and states on the worker: every bit through storage and back, records that hold a state, and their faults."""

import itertools
import sys
import threading
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.caches import random_caches
from tests.inside.worker import host_tier, slot_pools, storage_copies, worker_storage_tier
from tests.jobs import key_of
from tests.storage.memory_tier import FAULTY, MemoryTier
from tests.worker.engine import FAILED, FINISHED, EngineBase, make_landings_slow
from tpu_offload.cli.main import main
from tpu_offload.kernels import reference
from tpu_offload.layout import KVLayout
from tpu_offload.piece_keys import part_keys, piece_key
from tpu_offload.storage import RecordFormat, StorageSpec
from tpu_offload.storage.format import PAGE_NBYTES
from tpu_offload.types import CopyJob, CopyPart, HostDivision, JobKind, StepPlan
from tpu_offload.worker.storage import record_io
from tpu_offload.worker.storage.record_io import StorageItem, StorageRecords, record_payload_nbytes
from tpu_offload.worker.storage.slots import SlotPool

GB = 2**30
SIZE, NUM_LAYERS, NUM_BLOCKS, NUM_ROWS = 2, 2, 16, 8  # blocks in a chunk; blocks and rows in the caches
NUM_SEGMENTS = 20
PAGE = ((4, 8, 2, 6), "bfloat16")
CHUNK_NBYTES = SIZE * NUM_LAYERS * 768
WINDOW_GROUP, STATE_GROUP = 0, 5  # in names of pieces

# Per state layer, its arrays; and the records of a state.
CONVOLUTION = ((3, 8), "bfloat16")
STATES = {
    "larger than a chunk": ([CONVOLUTION, ((8, 8, 16), "float32")] * 2, 3),
    "smaller": ([CONVOLUTION, ((2, 8, 4), "float32")] * 2, 1),
    "two chunks": ([((4, 8, 24), "float32")] * 2, 2),
}
# Parts of a payload that leave the next ones unaligned; for one device.
ODD = ([((3, 5), "bfloat16"), ((3, 7, 41), "float32")], 2)
LARGER, NUM_PARTS = STATES["larger than a chunk"]


def split(cache, axis):
    """The same array, split over its devices along another axis."""
    sharding = cache.sharding
    if not isinstance(sharding, NamedSharding):
        return cache
    return jax.device_put(cache, NamedSharding(sharding.mesh, PartitionSpec(*[None] * axis, "model")))


class StateEngine(EngineBase):
    """With windows or states, and storage. Of host memory it has what was there before the job under test."""

    def __init__(self, states=LARGER, *, windows=(), num_devices=1, tier=FAULTY, heads_axis=2, **settings):
        rng = np.random.default_rng(3)

        def make(num, shape, dtype):
            return random_caches(
                rng, dtype=dtype, num_devices=num_devices, num_blocks=num, num_layers=1, page_shape=shape
            )

        caches = [cache for _ in range(NUM_LAYERS) for cache in make(NUM_BLOCKS, *PAGE)]
        caches += [
            split(cache, heads_axis if len(shape) == 3 else 2)
            for shape, dtype in states
            for cache in make(NUM_ROWS, shape, dtype)
        ]
        layout = KVLayout.from_caches(
            caches,
            block_size=4,
            groups=[(window, range(NUM_LAYERS)) for window in (0, *windows)],
            states=range(NUM_LAYERS, len(caches)),
            null_block=0,
        )
        row_nbytes = 0 if layout.state_group is None else layout.state_group.block_nbytes
        segment_gb = max(CHUNK_NBYTES, row_nbytes) / GB
        storage = {"storage_tier": tier, "max_storage_gb_in_flight": 1.0}
        storage |= {} if "storage_gb" in settings else {"num_storage_chunks": 64}
        host = {
            "host_gb": NUM_SEGMENTS * segment_gb,
            "host_segment_gb": segment_gb,
            "blocks_per_chunk": SIZE,
            "num_staging_blocks": 8,
        }
        super().__init__(rng, caches, layout, host | storage | settings)
        self.worker.wait_until_allocated()
        pools = slot_pools(self.worker)
        self.first_state = pools[1].first_slot if len(pools) > 1 else sys.maxsize
        self.step_id = 0

    @property
    def storage(self):
        return storage_copies(self.worker)

    @property
    def disk(self):
        return worker_storage_tier(self.worker)

    @property
    def memories(self):
        return [memory for of_pool in host_tier(self.worker).pools.memories() for memory in of_pool]

    def host(self):
        """Per page group, the bytes of its memory, in slots: of chunks blocks together, of states rows."""
        found = []
        for memory in self.memories:
            segments = [memory.arena.segment(i) for i in range(memory.arena.num_segments_ready)]
            rows = np.concatenate([reference.as_bytes(np.asarray(part)) for (part,) in segments])
            found.append(rows.reshape(-1, memory.blocks_per_chunk, *rows.shape[1:]).copy())
        return found

    def places(self, slot):
        """Per page group, the index of a slot in `host`; None if it is of another pool."""
        is_state, num = slot >= self.first_state, len(host_tier(self.worker).pools.memories()[0])
        return [
            (slot - self.first_state if is_state else slot) if (i >= num) == is_state else None
            for i in range(len(self.memories))
        ]

    def job(self, kind, *chunks, deleted=()):
        return CopyJob(job_id=self.new_job_id(), kind=kind, chunks=chunks, deleted_keys=tuple(deleted))

    def cascade(self, *chunks):
        return self.job(JobKind.CASCADE, *chunks)

    def delete(self, names):
        return self.job(JobKind.DELETE, deleted=names)

    def promote(self, *chunks):
        return self.job(JobKind.PROMOTE, *chunks)

    def step(self, *jobs, division=None):
        self.step_id += 1
        plan = StepPlan(step_id=self.step_id, jobs=jobs, next_job_id=self.num_jobs + 1, division=division)
        self.caches = self.worker.begin_step(plan, self.caches)
        self.worker.end_step(plan, self.caches)

    def run(self, job, state=FINISHED):
        self.step(job)
        result = self.drain()[job.job_id]
        assert (result.state, not result.error) == (state, state is FINISHED), result.error
        return result

    def fill(self, slots):
        """Saves random bytes into these slots."""
        self.scribble()
        chunks = [slot for slot in slots if slot < self.first_state]
        rows = [slot - self.first_state for slot in slots if slot >= self.first_state]
        places = [slot * SIZE + i for slot in chunks for i in range(SIZE)]
        parts = [CopyPart(group_id=0, block_ids=tuple(range(len(places))), host_block_ids=tuple(places))]
        if rows:
            group_id = len(self.layout.groups) - 1
            parts.append(CopyPart(group_id=group_id, block_ids=tuple(range(len(rows))), host_block_ids=tuple(rows)))
        self.run(CopyJob(job_id=self.new_job_id(), kind=JobKind.SAVE, parts=tuple(parts)))

    def state(self, number):
        """The slot of a state."""
        return self.first_state + number

    def expect(self, host, stored, *moves):
        """`host`, in which slots (from, to) have what `stored` has."""
        for before, after in moves:
            for source, target, old, new in zip(self.places(before), self.places(after), stored, host, strict=True):
                if source is not None:
                    new[target] = old[source]
        np.testing.assert_equal(self.host(), host)


def chunk(name):
    return key_of(name)


def window(name):
    return piece_key(key_of(name), WINDOW_GROUP)


def state(name):
    return piece_key(key_of(name), STATE_GROUP)


def parts(name, num=NUM_PARTS):
    return part_keys(state(name), num)


def engine_with_a_state(**settings):
    """One with a state and a chunk in storage, and what the host tier held then; other bytes are there now."""
    engine = StateEngine(**settings)
    engine.fill([0, engine.state(1)])
    stored = engine.host()
    engine.run(engine.cascade((chunk(1), 0), (state(1), engine.state(1))))
    engine.fill([0, engine.state(1)])
    return engine, stored


def check_round_trip(engine, num_parts):
    """Out of some slots, and into others, of which some had been written before."""
    slots = [0, 3, 4, *([engine.state(i) for i in (0, 2, 3)] if num_parts else [])]
    engine.fill(slots)
    stored = engine.host()
    names = [chunk(1), window(1), chunk(2), *([state(i) for i in (1, 2, 3)] if num_parts else [])]
    engine.run(engine.cascade(*zip(names, slots, strict=True)))
    engine.fill(slots)
    host = engine.host()
    assert not any(np.array_equal(*pair) for pair in zip(stored, host, strict=True))
    moves = [(3, 0), (0, 7), (4, 3)]
    if num_parts:
        moves += [(engine.state(a), engine.state(b)) for a, b in ((2, 0), (3, 5), (0, 3))]
    engine.run(engine.promote(*[(names[slots.index(source)], target) for source, target in moves]))
    engine.expect(host, stored, *moves)
    return names


@pytest.mark.parametrize("path", ["host", "hbm"])
@pytest.mark.parametrize(("case", "num_devices"), [*itertools.product([*STATES, "windows"], [1, 8]), ("odd", 1)])
def test_every_bit_comes_back(case, num_devices, path):
    states, num_parts = {**STATES, "windows": ([], 0), "odd": ODD}[case]
    windows = (9, 5) if case == "windows" else ()
    engine = StateEngine(states, windows=windows, num_devices=num_devices, storage_copy_path=path)
    names = check_round_trip(engine, num_parts)
    records = engine.disk.values
    of_states = {key for i in (1, 2, 3) for key in parts(i, num_parts)} if num_parts else set()
    assert set(records) == {*names[:3], *of_states}
    nbytes = PAGE_NBYTES + -(-CHUNK_NBYTES // PAGE_NBYTES) * PAGE_NBYTES
    assert {len(record) for record in records.values()} == {engine.disk.spec.record_nbytes} == {nbytes}


def test_every_bit_comes_back_of_arrays_that_are_split_over_different_axes():
    check_round_trip(StateEngine(num_devices=8, heads_axis=1), NUM_PARTS)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_every_bit_comes_back_from_a_file_and_after_a_restart(num_devices, tmp_path):
    settings = {"tier": "file", "storage_options": f"{tmp_path / 'kv'},min_free_gb=0", "num_devices": num_devices}
    engine = StateEngine(**settings)
    names = check_round_trip(engine, NUM_PARTS)
    engine.fill([0, engine.state(1)])
    stored = engine.host()
    engine.run(engine.cascade((chunk(9), 0), (state(9), engine.state(1))))
    engine.worker.close()
    second = StateEngine(**settings)
    (listed,) = second.worker.poll().setup.stored_keys
    assert listed is not None
    expected = {*names[:3], chunk(9), *(key for i in (1, 2, 3, 9) for key in parts(i))}
    assert (len(listed), set(listed)) == (len(expected), expected)
    second.run(second.promote((state(9), second.state(6)), (chunk(9), 5)))
    second.expect(second.host(), stored, (second.state(1), second.state(6)), (0, 5))
    second.worker.close()


def test_other_states_are_another_fingerprint(tmp_path):
    settings: dict[str, Any] = {"tier": "file", "storage_options": f"{tmp_path / 'kv'},min_free_gb=0"}
    engine = StateEngine(**settings)
    engine.fill([0, engine.state(1)])
    engine.run(engine.cascade((chunk(1), 0), (state(1), engine.state(1))))
    fingerprints = {engine.disk.spec.fingerprint}
    engine.worker.close()
    others = [(shape, {"float32": "int32"}.get(dtype, dtype)) for shape, dtype in cast(Any, LARGER)]
    other = StateEngine(others, **settings)
    assert other.worker.poll().setup.stored_keys == ((),)
    result = other.run(other.promote((chunk(1), 0), (state(1), other.state(1))))
    assert result.missing_chunks == (0, 1)
    fingerprints.add(other.disk.spec.fingerprint)
    other.worker.close()
    more = [
        StateEngine(num_devices=8),
        StateEngine(num_devices=8, heads_axis=1),
        StateEngine([]),
        StateEngine([], windows=(9,)),
    ]
    fingerprints |= {engine.disk.spec.fingerprint for engine in more}
    assert len(fingerprints) == 6


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(NUM_PARTS))
def test_a_state_without_one_of_its_records_is_missing_and_the_slot_stays(number):
    engine, stored = engine_with_a_state()
    engine.run(engine.delete([parts(1)[number]]))
    assert set(engine.disk.values) == {chunk(1), *parts(1)} - {parts(1)[number]}
    host = engine.host()
    result = engine.run(engine.promote((state(1), engine.state(1)), (chunk(1), 0)))
    assert (result.failed_blocks, result.missing_chunks) == ((), (0,))
    engine.expect(host, stored, (0, 0))


@pytest.mark.parametrize("damage", ["bit", "torn", "another part", "another state's", "empty"])
@pytest.mark.parametrize("number", [0, NUM_PARTS - 1])
def test_a_state_with_a_damaged_record_fails_and_the_slot_stays(number, damage):
    engine, stored = engine_with_a_state()
    key, other = parts(1)[number], parts(1)[1]
    values, record = engine.disk.values, bytearray(engine.disk.values[parts(1)[number]])
    if damage == "bit":
        record[-1 - (len(record) - PAGE_NBYTES - CHUNK_NBYTES)] ^= 1  # in the padding of the last part
    elif damage == "torn":
        record[len(record) // 2 :] = bytes(len(record) - len(record) // 2)
    elif damage == "another part":
        record[:] = values[other]
    elif damage == "another state's":
        engine.run(engine.cascade((state(2), engine.state(1))))
        record[:] = values[parts(2)[number]]
    else:
        record[:] = bytes(len(record))
    values[key] = bytes(record)
    host = engine.host()
    result = engine.run(engine.promote((chunk(1), 0), (state(1), engine.state(1))), FAILED)
    assert (result.failed_blocks, result.missing_chunks) == ((1,), (1,)), "it is deleted"
    assert result.error.startswith("1 of 2: RecordError: storage returned ")
    engine.expect(host, stored, (0, 0))


class Full(MemoryTier):
    """Has room for `most` records."""

    most = 64

    def write(self, key, record):
        if key not in self.values and len(self.values) >= self.most:
            raise OSError("full")
        super().write(key, record)


def test_a_write_that_fails_on_its_way_has_failed_and_its_parts_can_be_deleted():
    engine = StateEngine(tier=f"{__name__}:Full")
    engine.fill([0, engine.state(0), engine.state(1)])
    engine.disk.most = NUM_PARTS + 2
    engine.run(engine.cascade((state(1), engine.state(0))))
    result = engine.run(engine.cascade((state(2), engine.state(1))), FAILED)
    assert "OSError: full" in result.error
    assert set(engine.disk.values) == {*parts(1), *parts(2)[:2]}
    host = engine.host()
    result = engine.run(engine.promote((state(2), engine.state(0))))
    assert result.missing_chunks == (0,)
    engine.expect(host, host)
    engine.run(engine.delete(parts(2)))
    engine.run(engine.cascade((chunk(1), 0)))
    assert set(engine.disk.values) == {*parts(1), chunk(1)}


def test_a_state_counts_as_its_records_in_flight():
    engine = StateEngine(max_storage_gb_in_flight=1e-9)
    engine.fill([0, *(engine.state(i) for i in range(3))])
    engine.disk.gates["write"] = gate = threading.Event()
    job = engine.cascade((state(1), engine.state(0)), (chunk(1), 0), (state(2), engine.state(1)), (chunk(2), 1))
    engine.step(job)
    gate.set()
    result = engine.drain()[job.job_id]
    assert (result.state, result.failed_blocks) == (FAILED, (2, 3)), "3 + 1 + 3 records, and nothing in the last slot"
    assert f"more than {2 * NUM_PARTS} records in flight" in result.error
    engine.run(engine.cascade((state(2), engine.state(1)), (state(3), engine.state(2))))


def test_slots_in_which_nothing_is_are_not_written():
    engine = StateEngine()
    engine.fill([0, engine.state(1)])
    result = engine.run(engine.cascade((state(1), engine.state(1)), (state(2), engine.state(2)), (chunk(1), 1)), FAILED)
    assert result.failed_blocks == (1, 2)
    assert f"slot {engine.state(2)} was lost, or never written" in result.error
    assert set(engine.disk.values) == set(parts(1))


@pytest.mark.parametrize("group", range(2))
def test_a_state_that_was_lost_in_one_of_its_arrays_is_not_written(group):
    engine = StateEngine()
    engine.fill([0, engine.state(1)])
    host_tier(engine.worker).pools.memories()[1][group].lost[0, 1] = True
    engine.run(engine.cascade((state(1), engine.state(1))), FAILED)
    assert engine.disk.values == {}


def test_a_promotion_makes_its_slot_readable():
    engine, _ = engine_with_a_state()
    for memory in engine.memories:
        memory.lost[:] = True
    engine.run(engine.promote((state(1), engine.state(2)), (chunk(1), 1)))
    of_chunks, *of_states = [memory.lost[0] for memory in engine.memories]
    assert np.flatnonzero(~of_chunks).tolist() == [2, 3]
    assert [np.flatnonzero(~lost).tolist() for lost in of_states] == [[2]] * len(of_states)
    part = CopyPart(group_id=1, block_ids=(5,), host_block_ids=(2,))
    engine.run(CopyJob(job_id=engine.new_job_id(), kind=JobKind.LOAD, parts=(part,)))


# --- slots --------------------------------------------------------------------------------------


def test_a_slot_of_neither_pool_fails_its_job():
    engine = StateEngine()
    chunks, states = (pool.slots for pool in slot_pools(engine.worker))
    assert chunks.start == 0 < chunks.stop < states.start == engine.first_state < states.stop
    assert engine.first_state == engine.worker.poll().setup.segment_slots[0] * (NUM_SEGMENTS - 1), "one is for states"
    for slot in (-1, chunks.stop, states.start - 1, states.stop):
        result = engine.run(engine.promote((chunk(1), 0), (state(1), slot)), FAILED)
        assert result.error == (
            f"slots [0, {slot}]; expected 0 to {chunks.stop - 1}, or {states.start} to {states.stop - 1}"
        )


def divide(engine, number, chunks, states):
    engine.step(division=HostDivision(division_id=number, segments=(chunks, states)))
    for _ in range(3):
        engine.worker.poll()
        engine.worker.wait_until_allocated()


def test_slots_follow_the_division_of_memory():
    engine, stored = engine_with_a_state()
    last = slot_pools(engine.worker)[1].slots[-1]
    divide(engine, 1, 5, 15)
    host = engine.host()
    engine.run(engine.promote((state(1), last + 5)))
    engine.expect(host, stored, (engine.state(1), last + 5))
    divide(engine, 2, 15, 5)
    for kind in (JobKind.PROMOTE, JobKind.CASCADE):
        result = engine.run(engine.job(kind, (state(1), last)), FAILED)
        assert "expected 0 to 29, or 38 to 42" in result.error
    divide(engine, 3, 10, 10)
    result = engine.run(engine.cascade((state(1), engine.state(1)), (state(2), last)), FAILED)
    assert (result.failed_blocks, "was lost, or never written" in result.error) == ((1,), True)


@pytest.mark.parametrize("when", ["while it is read", "while it is written"])
def test_a_promotion_into_memory_that_is_freed_fails(when, monkeypatch):
    engine, stored = engine_with_a_state()
    last = slot_pools(engine.worker)[1].slots[-1]
    slow: list[Any] = []
    if when == "while it is read":
        engine.disk.gates["read"] = gate = threading.Event()
    else:
        slow = make_landings_slow(engine, monkeypatch)
    job = engine.promote((state(1), last), (chunk(1), 0))
    engine.step(job)
    while when == "while it is written" and len(slow) < 3:  # two arrays of the state, one of the chunk
        engine.worker.poll()
    divide(engine, 1, 15, 5)
    host = engine.host()
    if slow:
        for token in slow:
            token.ready = True
    else:
        gate.set()
    result = engine.drain()[job.job_id]
    assert (result.state, result.failed_blocks) == (FAILED, (0,))
    assert ("memory was freed" if slow else "is not allocated") in result.error
    engine.expect(host, stored, (0, 0))


# --- sizes and tools ----------------------------------------------------------------------------


def test_records_have_room_for_states_that_are_padded(monkeypatch):
    """As on a TPU, where the layout does not know how many bytes a row takes; the rest of a record is zeros."""
    chunks = SlotPool(memories=[], copiers=[cast(Any, Bytes(90))])
    states = SlotPool(memories=[], copiers=[cast(Any, Bytes(301))], num_parts=3)
    assert record_payload_nbytes([chunks]) == 90
    assert record_payload_nbytes([chunks, states]) == 101
    monkeypatch.setattr(record_io, "aligned", lambda nbytes, alignment: np.full(nbytes, 0xEE, np.uint8))
    record_format = RecordFormat(fingerprint=b"f" * 16, worker_id=0, num_shards=1, payload_nbytes=101)
    nbytes = record_format.record_nbytes
    tier = MemoryTier(StorageSpec(record_nbytes=nbytes, num_chunks=9, worker_id=0, fingerprint="", options=""))
    records = StorageRecords(tier, record_format)
    for pool, key in ((states, state(1)), (chunks, chunk(1))):
        data = np.arange(pool.payload_nbytes, dtype=np.uint8) | 1
        written = StorageItem(1, (0,), (key,), 0, pool, cast(Any, [data]))
        records.write(written)
        records.read(read := StorageItem(2, (0,), (key,), 0, pool))
        assert (written.error, written.payload, read.error, read.is_read) == ("", None, "", True)
        assert read.payload is not None
        np.testing.assert_array_equal(read.payload[0], data)
        payload = b"".join(bytes(record_format.payload_of(memoryview(tier.values[k]))) for k in pool.record_keys(key))
        assert payload == bytes(data) + bytes(pool.num_records * 101 - len(data))


class Bytes:
    """A copier of slots of so many bytes, which are a payload."""

    def __init__(self, nbytes):
        self.payload_nbytes = nbytes

    def pack(self, payload, target):
        target[:] = payload

    def unpack(self, source):
        return source


@pytest.mark.parametrize("case", STATES)
def test_files_are_as_large_as_the_setting_allows(case, tmp_path):
    gb = 0.001
    storage = {"storage_gb": gb, "storage_options": f"{tmp_path / 'kv'},min_free_gb=0"}
    engine = StateEngine(STATES[case][0], tier="file", **storage)
    nbytes = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.*"))
    assert gb * GB - 2 * engine.disk.spec.record_nbytes - 8 * PAGE_NBYTES < nbytes <= gb * GB
    engine.worker.close()


def test_tools_list_and_verify_the_records_of_states(tmp_path, capsys):
    engine, _ = engine_with_a_state(tier="file", storage_options=f"{tmp_path / 'kv'},min_free_gb=0")
    fingerprint = engine.disk.spec.fingerprint
    engine.worker.close()
    assert main(["tier", "ls", "--keys", str(tmp_path / "kv")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(fingerprint + " ")]
    assert {fields[3] for fields in lines} == {key.hex() for key in (chunk(1), *parts(1))}
    assert all(key.hex().startswith(chunk(1).hex()) for key in parts(1)), "a state's are beside those of its chunk"
    assert main(["tier", "verify", str(tmp_path / "kv")]) == 0
    assert f"{1 + NUM_PARTS} good" in capsys.readouterr().out
    assert main(["tier", "clear", "--yes", str(tmp_path / "kv")]) == 0
    assert f"Deleted {1 + NUM_PARTS} chunks" in capsys.readouterr().out
