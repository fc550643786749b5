"""What every storage tier has to pass: `for check in CHECKS: check(make)`, with a function that makes a fresh one."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tpu_offload.storage import StorageSpec, StorageTier

NBYTES, NUM_CHUNKS = 3 * 4096 + 40, 16  # no whole number of pages
SPEC = StorageSpec(payload_nbytes=NBYTES, num_chunks=NUM_CHUNKS, worker_id=1, fingerprint="f" * 32, options="")

type MakeTier = Callable[[StorageSpec], StorageTier]


def key_of(i: int) -> bytes:
    return bytes([i % 251]) * 3 + b"/\0:" + i.to_bytes(4, "little") + bytes(50)


def payload(seed: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8))


def read(tier: StorageTier, key: bytes) -> memoryview:
    target = memoryview(np.full(NBYTES, 0x5A, np.uint8))
    tier.read(key, target)
    return target


def gives_back_what_was_written(make: MakeTier) -> None:
    tier = make(SPEC)
    for i in range(NUM_CHUNKS):
        tier.write(key_of(i), payload(i).toreadonly())
    for i in reversed(range(NUM_CHUNKS)):
        assert read(tier, key_of(i)) == payload(i)
        assert read(tier, key_of(i)) == payload(i), "a read changes nothing"
    tier.close()


def keeps_no_view_of_a_payload(make: MakeTier) -> None:
    """The caller uses its memory for something else as soon as the call returns."""
    tier, buffer = make(SPEC), np.array(payload(1))
    tier.write(key_of(1), memoryview(buffer).toreadonly())
    buffer[:] = 0
    assert read(tier, key_of(1)) == payload(1)
    first = read(tier, key_of(1))
    tier.write(key_of(1), payload(2).toreadonly())
    assert first == payload(1)
    tier.close()


def writes_in_place_of_what_was_there(make: MakeTier) -> None:
    tier = make(SPEC)
    for seed in (1, 2):
        for i in range(NUM_CHUNKS):
            tier.write(key_of(i), payload(seed * 100 + i).toreadonly())
    for i in range(NUM_CHUNKS):
        assert read(tier, key_of(i)) == payload(200 + i)
    tier.close()


def knows_no_other_keys(make: MakeTier) -> None:
    tier = make(SPEC)
    with pytest.raises((KeyError, OSError)):
        read(tier, key_of(0))
    tier.write(key_of(1), payload(1).toreadonly())
    for key in (key_of(0), key_of(1)[:-1], key_of(1) + b"\0"):
        with pytest.raises((KeyError, OSError)):
            read(tier, key)
    tier.close()


def deletes_and_has_room_again(make: MakeTier) -> None:
    tier = make(SPEC)
    for start in range(0, 5 * NUM_CHUNKS, NUM_CHUNKS):
        keys = [key_of(start + i) for i in range(NUM_CHUNKS)]
        for i, key in enumerate(keys):
            tier.write(key, payload(start + i).toreadonly())
        tier.delete((*keys[1:], key_of(10**6)))  # one that was never there
        assert read(tier, keys[0]) == payload(start), "the others stay"
        for key in keys[1:]:
            with pytest.raises((KeyError, OSError)):
                read(tier, key)
        tier.delete(keys)  # again
        tier.delete(())
    tier.close()


def serves_several_threads(make: MakeTier) -> None:
    tier = make(SPEC)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            own = [key_of(100 * thread + i) for i in range(NUM_CHUNKS // 4)]
            for turn in range(8):
                for i, key in enumerate(own):
                    tier.write(key, payload(1000 * turn + 100 * thread + i).toreadonly())
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


CHECKS: list[Callable[[MakeTier], None]] = [
    gives_back_what_was_written,
    keeps_no_view_of_a_payload,
    writes_in_place_of_what_was_there,
    knows_no_other_keys,
    deletes_and_has_room_again,
    serves_several_threads,
]
