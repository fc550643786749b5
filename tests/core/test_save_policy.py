"""What is worth saving."""

import hashlib
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from tests.core.fakes import FakeEngine, tokens
from tpu_offload import JobKind, SavePolicy
from tpu_offload.config import OffloadConfig, SaveEvent
from tpu_offload.core.policies import Use
from tpu_offload.core.save_policy import SaveBySightings, make_save_policy
from tpu_offload.types import ChunkKey


def keys(first: int, end: int, name: str = "") -> list[ChunkKey]:
    return [ChunkKey(hashlib.blake2b(f"{name}{i}".encode(), digest_size=24).digest()) for i in range(first, end)]


def test_without_sightings_everything_is_saved_and_nothing_is_counted():
    tracemalloc.start()
    try:
        policy = SaveBySightings()
        policy.observe(Use(0), keys(0, 5))
        policy.resize(10**5)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 10_000, "counts of 256 keys take more"
    assert policy.num_chunks_worth_saving(keys(0, 5), 2, 5) == 3


@pytest.mark.parametrize("num_sightings", [2, 3, 15])
def test_saves_from_the_nth_sighting_on(num_sightings):
    policy = SaveBySightings(num_sightings=num_sightings)
    for i in range(1, num_sightings + 2):
        policy.observe(Use(i), keys(0, 8))
        assert policy.num_chunks_worth_saving(keys(0, 8), 0, 8) == (8 if i >= num_sightings else 0)


def test_a_shared_prefix_is_saved_up_to_where_prompts_diverge():
    policy = SaveBySightings(num_sightings=2)
    one, other = keys(0, 3) + keys(0, 4, "one"), keys(0, 3) + keys(0, 4, "other")
    policy.observe(Use(0), one)
    policy.observe(Use(1), other)
    assert policy.num_chunks_worth_saving(other, 0, 7) == 3
    assert policy.num_chunks_worth_saving(other, 1, 7) == 2
    assert policy.num_chunks_worth_saving(other, 3, 7) == 0
    policy.observe(Use(2), other, 5)  # the first five were recorded before
    assert policy.num_chunks_worth_saving(other, 5, 7) == 2
    assert policy.num_chunks_worth_saving(other, 0, 7) == 3, "never a hole"


def test_the_settings_decide():
    policy = make_save_policy(
        OffloadConfig.create(save_on="eviction,preemption", save_after_sightings=3, decode_save=True)
    )
    assert [policy.saves_on(event) for event in SaveEvent] == [False, True, True]
    assert policy.num_tokens_to_save(num_prompt_tokens=5, num_computed_tokens=9) == 9
    policy.observe(Use(0), keys(0, 2))
    assert policy.num_chunks_worth_saving(keys(0, 2), 0, 2) == 0
    policy = make_save_policy(OffloadConfig.create())
    assert [policy.saves_on(event) for event in SaveEvent] == [True, False, False]
    assert policy.num_tokens_to_save(num_prompt_tokens=5, num_computed_tokens=9) == 5
    assert policy.num_tokens_to_save(num_prompt_tokens=5, num_computed_tokens=3) == 3


class TwoChunks(SavePolicy):
    """A policy of a user's own: the first two chunks of each prompt."""

    def __init__(self) -> None:
        self.observed: list[tuple[int, int]] = []

    def saves_on(self, event: SaveEvent) -> bool:
        return np.bool_(event is SaveEvent.COMPUTE)  # type: ignore[return-value]

    def num_tokens_to_save(self, *, num_prompt_tokens: int, num_computed_tokens: int) -> int:
        return min(num_prompt_tokens, num_computed_tokens)

    def observe(self, use: Use, keys: Sequence[ChunkKey], first: int = 0) -> None:
        self.observed.append((first, len(keys)))

    def num_chunks_worth_saving(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        return np.int64(max(0, min(end, 2) - first))  # type: ignore[return-value]


def test_a_policy_of_ones_own():
    policy = TwoChunks()
    engine = FakeEngine(save_policy=policy)
    request = engine.add("a", tokens(16))
    assert request
    plan, _ = engine.step({"a": 16})
    assert [job.block_ids for job in plan.of(JobKind.SAVE)] == [tuple(request.block_ids[:2])]
    assert policy.observed == [(0, 4)]
