"""A process that uses a tier at random until it is killed: `python -m tests.storage.kill_child DIR-or-URL SEED`.

It prints a line before and after each call, which is what is known of it when it is gone.
"""

import itertools
import random
import sys

from tests.storage.conformance import NUM_CHUNKS, SPEC, key_of, payload, read, start, write
from tpu_offload.storage import StorageSpec
from tpu_offload.storage.file import FileTier
from tpu_offload.storage.object import ObjectTier

NUM_KEYS = 3 * NUM_CHUNKS


def seed_of(number: int) -> int:
    """What is written for a key is always the same, as for chunks."""
    return 31 * number + 7


def spec_of(place: str) -> StorageSpec:
    """Of the file tier in a directory, or of the object tier at a URL."""
    return StorageSpec(
        record_nbytes=SPEC.record_nbytes,
        num_chunks=NUM_CHUNKS,
        worker_id=SPEC.worker_id,
        fingerprint=SPEC.fingerprint,
        options=place if "://" in place else f"{place},min_free_gb=0",
    )


def main(place: str, seed: int) -> None:
    rng = random.Random(seed)
    tier, keys = start(ObjectTier if "://" in place else FileTier, spec_of(place))
    held = {number for number in range(NUM_KEYS) if key_of(number) in keys}
    print("began", flush=True)
    for _ in itertools.count():
        number = rng.randrange(NUM_KEYS)
        call = rng.choices(("write", "delete", "read", "clear"), (10, 3, 3, 0.5))[0]
        if call == "write" and len(held | {number}) > NUM_CHUNKS:
            number = rng.choice(sorted(held))
            call = "delete"
        print(call, number, flush=True)
        if call == "write":
            write(tier, key_of(number), seed_of(number))
            held.add(number)
        elif call == "delete":
            tier.delete([key_of(number)])
            held.discard(number)
        elif call == "clear":
            tier.clear()
            held.clear()
        elif number in held:
            try:
                assert read(tier, key_of(number)) == payload(seed_of(number)), "a wrong byte"
            except AssertionError:
                raise
            except Exception:  # torn when the last one was killed
                tier.delete([key_of(number)])
                held.discard(number)
        print("done", call, number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
