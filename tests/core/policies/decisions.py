"""A long run of a small tier, and what a policy evicted in it: the same for the same calls."""

import hashlib
import random

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import POLICIES, EvictionPolicy, PriorityPolicy, Use
from tpu_offload.types import ChunkKey, Pool


def run(policy: EvictionPolicy, *, priorities: tuple[int, ...] = (0,), repeats: int = 0) -> list[ChunkKey]:
    """Requests that share prefixes, some of them concurrent.

    Args:
      policy: a new one.
      priorities: of the requests, in turn.
      repeats: how often the calls of each use are repeated.
    Returns:
      What was evicted, in order.
    """
    rng = random.Random(0)
    index = ChunkIndex(policy, record=True)
    index.grow(Pool.CHUNKS, 120)
    evicted: list[ChunkKey] = []
    pins: list[list[ChunkKey]] = []
    for i in range(900):
        use = Use(i, priority=priorities[i % len(priorities)])
        chain = _prefix(rng)
        num_found = len(index.find(chain))
        for _ in range(repeats + 1):
            index.touch(use, chain, num_found)
        missing, _ = index.missing(chain, num_found, len(chain))
        cut = rng.randint(0, len(missing))
        for part in (missing[:cut], missing[cut:]):
            slots = index.allocate(use, chain, part, protected=set(chain)) if part else []
            if slots:
                index.complete([chain[j] for j in part[: len(slots)]], slots, success=True)
        for _ in range(repeats + 1):
            index.touch(use, chain, len(chain))
        found = chain[: len(index.find(chain))]
        if found:
            index.pin(found)
            pins.append(found)
        if len(pins) > 4:
            index.unpin(pins.pop(rng.randrange(4)))
        if i == 500:
            index.grow(Pool.CHUNKS, 150)
        if i % 100 == 99:
            index.invalidate(rng.sample(chain, 1))
        evicted += [key for keys, found, _ in index.take_changes() if not found for key in keys]
        if i % 10 == 0:
            index.check_invariants()
    assert len(evicted) > 500
    return evicted


def _prefix(rng: random.Random) -> list[ChunkKey]:
    """A few words are frequent; each chunk's key depends on all chunks before it."""
    words = [str(min(rng.randrange(20), rng.randrange(20))) for _ in range(rng.randint(1, 12))]
    prefixes = ["".join(f"{word}," for word in words[: j + 1]) for j in range(len(words))]
    return [ChunkKey(hashlib.sha256(prefix.encode()).digest()) for prefix in prefixes]


def show() -> None:
    """Prints a line for each policy with a digest of all its decisions."""
    for name, make in POLICIES.items():
        for policy, priorities in ((make(), (0,)), (PriorityPolicy(make), (0, 3, -1))):
            print(name, hashlib.sha256(b"".join(run(policy, priorities=priorities))).hexdigest())
