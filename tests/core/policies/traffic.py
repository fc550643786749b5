"""Requests as lists of chunk keys, and a tier that serves them."""

import random
from collections.abc import Iterator

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.types import ChunkKey, Pool


class Tier:
    """A chunk index with a policy; each prompt is looked up, loaded and saved, as the scheduler does it."""

    def __init__(self, policy: EvictionPolicy, num_chunks: int) -> None:
        self.policy = policy
        self.index = ChunkIndex(policy)
        self.index.grow(Pool.CHUNKS, num_chunks)
        self.num_served = 0

    def serve(self, prompt: list[ChunkKey], *, num_in_hbm: int = 0, num_in_storage: int = 0) -> int:
        """Returns how many chunks were found."""
        self.index.tidy()  # as the scheduler does in each step
        use = self.new_use(num_in_hbm, num_in_storage)
        num_found = len(self.index.find(prompt))
        self.index.touch(use, prompt, num_found)
        self.save(use, prompt, len(prompt))
        self.index.touch(use, prompt, len(prompt))
        return num_found

    def serve_all(self, prompts) -> int:
        return sum(self.serve(prompt) for prompt in prompts)

    def resize(self, num_chunks: int) -> None:
        """Chunks in slots that no longer exist are invalidated."""
        self.index.invalidate_slots(num_chunks, max(num_chunks, self.index.num_slots(Pool.CHUNKS)))
        self.index.shrink(Pool.CHUNKS, num_chunks)
        self.index.grow(Pool.CHUNKS, num_chunks)

    def new_use(self, num_in_hbm: int = 0, num_in_storage: int = 0) -> Use:
        self.num_served += 1
        return Use(self.num_served, num_in_hbm=num_in_hbm, num_in_storage=num_in_storage)

    def save(self, use: Use, prompt: list[ChunkKey], end: int) -> None:
        """Saves what is missing of the first `end` chunks."""
        missing, _ = self.index.missing(prompt, 0, end)
        if missing:
            slots = self.index.allocate(use, prompt, missing, protected=set(prompt))
            self.index.complete([prompt[i] for i in missing[: len(slots)]], slots, success=True)

    def num_kept(self, prompt: list[ChunkKey]) -> int:
        return len(self.index.find(prompt))


def chain(name: object, num: int, before: list[ChunkKey] = []) -> list[ChunkKey]:  # noqa: B006 (never changed)
    """`before`, and `num` chunks of this name."""
    return before + [ChunkKey(f"{name}/{i}".encode()) for i in range(num)]


def conversations(
    rng: random.Random, num_requests: int, *, comes_back: float = 0.7, users: int = 40, ends: int = 0
) -> Iterator[list[ChunkKey]]:
    """Users of three services with a system prompt each. A turn brings 1 to 4 chunks; one in three requests is alone.

    Args:
      comes_back: the probability of another turn.
      users: number of concurrent conversations.
      ends: chunks at the end of each prompt that the next turn does not contain.
    """
    systems = [chain(f"system {i}", 2 + 3 * i) for i in range(3)]
    going: list[list[ChunkKey]] = []
    for i in range(num_requests):
        if rng.random() < 1 / 3:
            yield chain(f"alone {i}", rng.randint(1, 12))
            continue
        if len(going) < users:
            going.append(rng.choice(systems))
        place = rng.randrange(len(going))
        going[place] = chain(f"turn {i}", rng.randint(1, 4), going[place])
        yield chain(f"end {i}", ends, going[place])
        if rng.random() > comes_back or len(going[place]) > 40:
            del going[place]


def questions(seed: int) -> list[list[ChunkKey]]:
    """About random documents, some more popular than others, at random times."""
    rng = random.Random(seed)
    documents = [chain(f"document {i}", rng.randint(3, 12)) for i in range(600)]
    asked = rng.choices(documents, [(i + 1) ** -0.8 for i in range(600)], k=4000)
    return [chain(f"question {i}", 1, document) for i, document in enumerate(asked)]
