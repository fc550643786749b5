"""What every storage tier has to pass: `for check in CHECKS: check(make)`, and a shared one `SHARED_CHECKS`, too.

`make(spec)` makes a tier. In each check the first one is empty; a later one is another incarnation of the same worker,
or of a shared tier another engine.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tpu_offload.errors import TransferError
from tpu_offload.storage import RecordFormat, StorageSpec, StorageTier
from tpu_offload.storage.format import PAGE_NBYTES

NBYTES, NUM_CHUNKS = 3 * 4096 + 40, 16  # no whole number of pages
FORMAT = RecordFormat(fingerprint=b"f" * 16, worker_id=1, num_shards=2, payload_nbytes=NBYTES)
SPEC = StorageSpec(
    record_nbytes=FORMAT.record_nbytes,
    num_chunks=NUM_CHUNKS,
    worker_id=FORMAT.worker_id,
    fingerprint=FORMAT.fingerprint.hex(),
    options="",
)

type MakeTier = Callable[[StorageSpec], StorageTier]


def key_of(i: int) -> bytes:
    """Keys of two lengths, with bytes that no name of a file or object may have."""
    return bytes([i % 251]) * 3 + b"/\0:" + i.to_bytes(4, "little") + bytes(30 if i % 2 else 190)


def payload(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()


def new_record(fill: int = 0) -> memoryview:
    """Memory as callers have it: page-aligned."""
    memory = np.full(FORMAT.record_nbytes + PAGE_NBYTES, fill, np.uint8)
    start = -memory.ctypes.data % PAGE_NBYTES
    return memoryview(memory[start : start + FORMAT.record_nbytes])


def sealed(tier: StorageTier, key: bytes, seed: int) -> memoryview:
    record = new_record()
    FORMAT.payload_of(record)[:] = payload(seed)
    FORMAT.seal(record, key, generation=tier.generation)
    return record


def write(tier: StorageTier, key: bytes, seed: int) -> None:
    tier.write(key, sealed(tier, key, seed).toreadonly())


def read(tier: StorageTier, key: bytes) -> bytes:
    """What is stored, verified as the caller of a tier does."""
    record = new_record(0x5A)
    tier.read(key, record)
    return bytes(FORMAT.verify(record, key, generation=tier.generation))


def is_missing(tier: StorageTier, key: bytes) -> bool:
    try:
        read(tier, key)
    except (KeyError, OSError, TransferError):
        return True
    return False


def start(make: MakeTier, spec: StorageSpec = SPEC) -> tuple[StorageTier, Sequence[bytes]]:
    """A tier, and what it lists."""
    tier = make(spec)
    keys = tier.stored_keys()
    assert len(set(keys)) == len(keys) <= spec.num_chunks
    return tier, keys


def gives_back_what_was_written(make: MakeTier) -> None:
    tier, keys = start(make)
    assert not keys
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)
    for i in reversed(range(NUM_CHUNKS)):
        assert read(tier, key_of(i)) == payload(i)
        assert read(tier, key_of(i)) == payload(i), "a read changes nothing"
    tier.close()


def gives_back_every_byte(make: MakeTier) -> None:
    """Header and padding too."""
    tier, _ = start(make)
    record, found = sealed(tier, key_of(1), 1), new_record(0x5A)
    tier.write(key_of(1), record.toreadonly())
    tier.read(key_of(1), found)
    assert found == record
    tier.close()


def keeps_no_view_of_a_record(make: MakeTier) -> None:
    """The caller uses its memory for something else as soon as the call returns."""
    tier, _ = start(make)
    record = sealed(tier, key_of(1), 1)
    tier.write(key_of(1), record.toreadonly())
    record[:] = bytes(len(record))
    assert read(tier, key_of(1)) == payload(1)
    first = new_record()
    tier.read(key_of(1), first)
    write(tier, key_of(1), 2)
    assert FORMAT.payload_of(first) == payload(1)
    tier.close()


def writes_in_place_of_what_was_there(make: MakeTier) -> None:
    tier, _ = start(make)
    for seed in (1, 2):
        for i in range(NUM_CHUNKS):
            write(tier, key_of(i), seed * 100 + i)
    for i in range(NUM_CHUNKS):
        assert read(tier, key_of(i)) == payload(200 + i)
    tier.close()


def knows_no_other_keys(make: MakeTier) -> None:
    tier, _ = start(make)
    with pytest.raises((KeyError, OSError)):
        read(tier, key_of(0))
    write(tier, key_of(1), 1)
    for key in (key_of(0), key_of(1)[:-1], key_of(1) + b"\0"):
        with pytest.raises((KeyError, OSError)):
            read(tier, key)
    tier.close()


def deletes_and_has_room_again(make: MakeTier) -> None:
    tier, _ = start(make)
    for first in range(0, 5 * NUM_CHUNKS, NUM_CHUNKS):
        keys = [key_of(first + i) for i in range(NUM_CHUNKS)]
        for i, key in enumerate(keys):
            write(tier, key, first + i)
        tier.delete((*keys[1:], key_of(10**6)))  # one that was never there
        assert read(tier, keys[0]) == payload(first), "the others stay"
        for key in keys[1:]:
            with pytest.raises((KeyError, OSError)):
                read(tier, key)
        tier.delete(keys)  # again
        tier.delete(())
    tier.close()


def is_empty_once_it_is_cleared(make: MakeTier) -> None:
    tier, _ = start(make)
    tier.clear()  # an empty one
    for turn in range(3):
        for i in range(NUM_CHUNKS):
            write(tier, key_of(100 * turn + i), i)
        tier.clear()
        for i in range(NUM_CHUNKS):
            assert is_missing(tier, key_of(100 * turn + i))
    write(tier, key_of(0), 7)
    assert read(tier, key_of(0)) == payload(7)
    assert is_missing(tier, key_of(1))
    tier.close()


def lists_only_what_is_there(make: MakeTier) -> None:
    """After a restart; a tier that keeps nothing lists nothing."""
    tier, _ = start(make)
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)
    tier.delete([key_of(i) for i in range(0, NUM_CHUNKS, 3)])
    write(tier, key_of(1), 100)
    tier.close()
    tier, keys = start(make)
    left = [i for i in range(NUM_CHUNKS) if i % 3]
    assert sorted(keys) == sorted(key_of(i) for i in left) * bool(keys)
    for i in left:
        if keys:
            assert read(tier, key_of(i)) == payload(100 if i == 1 else i)
    tier.delete(keys)
    for i in range(NUM_CHUNKS):
        write(tier, key_of(200 + i), i)
    for i in range(NUM_CHUNKS):
        assert read(tier, key_of(200 + i)) == payload(i)
    tier.close()


def stays_empty_once_it_is_cleared(make: MakeTier) -> None:
    tier, _ = start(make)
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)
    tier.clear()
    write(tier, key_of(1), 50)
    tier.close()
    tier, keys = start(make)
    assert set(keys) <= {key_of(1)}
    for i in range(NUM_CHUNKS):
        assert is_missing(tier, key_of(i)) or (i == 1 and read(tier, key_of(i)) == payload(50))
    tier.close()


def has_nothing_of_another_model(make: MakeTier) -> None:
    tier, _ = start(make)
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)
    tier.close()
    tier, keys = start(make, dataclasses.replace(SPEC, fingerprint="0e" * 16))
    assert not keys
    record = new_record()
    for i in range(NUM_CHUNKS):
        with pytest.raises((KeyError, OSError)):
            tier.read(key_of(i), record)
    tier.close()


def serves_several_threads(make: MakeTier) -> None:
    tier, _ = start(make)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            own = [key_of(100 * thread + i) for i in range(NUM_CHUNKS // 4)]
            for turn in range(8):
                for i, key in enumerate(own):
                    write(tier, key, 1000 * turn + 100 * thread + i)
                for i, key in enumerate(own):
                    assert read(tier, key) == payload(1000 * turn + 100 * thread + i)
                tier.delete(own)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    tier.close()


def counts_leading_keys(make: MakeTier) -> None:
    """Also of prefixes with holes, and of many at once."""
    tier, _ = start(make)
    keys = [key_of(i) for i in range(40)]
    assert list(tier.find([])) == []
    assert list(tier.find([keys, [], keys[:1]])) == [0, 0, 0]
    for i in {*range(40)} - {5, 17, 39}:
        write(tier, keys[i], i)
    ranges = [(first, end) for first in (0, 1, 5, 6, 17, 18, 38, 39) for end in (first, first + 1, 12, 18, 39, 40)]
    prefixes = [keys[first:end] for first, end in ranges]
    missing = [next(i for i in (5, 17, 39, 40) if i >= first) for first, _ in ranges]
    expected = [max(0, min(end, hole) - first) for (first, end), hole in zip(ranges, missing, strict=True)]
    assert list(tier.find(prefixes)) == expected
    assert [list(tier.find([prefix])) for prefix in prefixes] == [[n] for n in expected], "one by one"
    tier.delete([keys[0], keys[9]])
    assert list(tier.find([keys[:5], keys[6:17]])) == [0, 3]
    tier.clear()
    assert list(tier.find([keys, keys[6:17]])) == [0, 0]
    tier.close()


def finds_what_others_write(make: MakeTier) -> None:
    """While both are open; and nothing of another worker or model."""
    first, _ = start(make)
    second, _ = start(make)
    keys = [key_of(i) for i in range(NUM_CHUNKS)]
    for end in range(NUM_CHUNKS):
        assert list(second.find([keys])) == [end]
        write(first, keys[end], end)
    assert list(second.find([keys])) == [NUM_CHUNKS]
    assert read(second, keys[3]) == payload(3)
    second.delete(keys[3:4])
    assert list(first.find([keys])) == [3]
    for changes in ({"worker_id": 2}, {"fingerprint": "0e" * 16}):
        other, _ = start(make, dataclasses.replace(SPEC, **changes))
        assert list(other.find([keys])) == [0]
        other.close()
    first.close()
    second.close()


SHARED_CHECKS: list[Callable[[MakeTier], None]] = [counts_leading_keys, finds_what_others_write]
CHECKS: list[Callable[[MakeTier], None]] = [
    gives_back_what_was_written,
    gives_back_every_byte,
    keeps_no_view_of_a_record,
    writes_in_place_of_what_was_there,
    knows_no_other_keys,
    deletes_and_has_room_again,
    is_empty_once_it_is_cleared,
    lists_only_what_is_there,
    stays_empty_once_it_is_cleared,
    has_nothing_of_another_model,
    serves_several_threads,
]
