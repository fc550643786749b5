"""What each step computes, without a model: the tests supply the sampled tokens."""

import dataclasses
from typing import Any

import pytest

from tests.engine.helpers import SMALL_ENGINE, make_request, random_tokens
from tpu_offload.engine.scheduler import Scheduler
from tpu_offload.engine.sequence import Phase, Sequence
from tpu_offload.hashing import BlockHasher


class FakeOffloading:
    """A fake that promises `num_tokens` to every request."""

    saves_on_eviction = False

    def __init__(self, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens
        self.events: list[tuple[Any, ...]] = []

    def look_up(self, sequence, *, num_computed_tokens):
        return min(self.num_tokens, len(sequence.tokens) - 1 - num_computed_tokens)

    def release(self, sequence):
        self.events.append(("release", sequence.request_id))

    def start_load(self, sequence, num_tokens):
        self.events.append(("start_load", sequence.request_id))

    def preempt(self, sequence):
        self.events.append(("preempt", sequence.request_id))
        return False

    def finish(self, sequences):
        self.events += [("finish", sequence.request_id) for sequence in sequences]


def make_scheduler(*, offload=None, **changes) -> Scheduler:
    config = dataclasses.replace(SMALL_ENGINE, **changes)
    return Scheduler(config, BlockHasher(b"model", block_size=config.block_size), offload=offload)


def add(scheduler, name, num_prompt, *, max_tokens=20, seed=None) -> Sequence:
    prompt = random_tokens(seed if seed is not None else sum(name.encode()), num_prompt)
    request = make_request(name, prompt, max_tokens=max_tokens)
    assert scheduler.why_unservable(request) == ""
    sequence = Sequence(request, 0.0, list(prompt))
    scheduler.add(sequence)
    return sequence


def step(scheduler) -> dict[str, int]:
    """Runs one step that samples token 0 everywhere; returns the computed tokens by request."""
    batch = scheduler.schedule()
    scheduler.complete(batch, [(0, 0.0)] * len(batch), now_s=1.0)
    scheduler.check_invariants()
    return {run.sequence.request_id: run.num_tokens for run in batch}


def step_until(scheduler, done) -> None:
    for _ in range(30):
        if done():
            return
        step(scheduler)
    raise AssertionError("not reached in 30 steps")


def test_long_prompts_are_chunked_and_share_the_budget():
    scheduler = make_scheduler()
    add(scheduler, "a", 40)
    add(scheduler, "b", 30)
    assert [step(scheduler) for _ in range(4)] == [{"a": 32}, {"a": 8, "b": 24}, {"a": 1, "b": 6}, {"a": 1, "b": 1}]


def test_a_chunk_inside_the_prompt_samples_nothing():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 40)
    batch = scheduler.schedule()
    assert scheduler.complete(batch, [(5, -0.5)], now_s=1.0) == []
    batch = scheduler.schedule()
    assert scheduler.complete(batch, [(6, -0.25)], now_s=2.0) == [sequence]
    assert sequence.output_tokens == (6,)
    assert sequence.first_token_s == 2.0


def test_no_more_than_max_num_seqs_hold_blocks():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 4)
    assert set(step(scheduler)) == {"a", "b"}
    scheduler.finish("a")
    assert set(step(scheduler)) == {"b", "c"}


def test_prefix_in_hbm_is_shared_but_one_token_is_computed():
    scheduler = make_scheduler()
    add(scheduler, "a", 24, seed=1)
    step(scheduler)
    second = add(scheduler, "b", 24, seed=1)
    assert step(scheduler)["b"] == 4  # 24 tokens are 6 full blocks; the last one has the token to compute
    assert second.prompt_tokens.hbm == 20
    assert second.prompt_tokens.computed == 4


def test_blocks_are_findable_only_after_the_step_that_computes_them():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    first, second = add(scheduler, "a", 24, seed=1), add(scheduler, "b", 24, seed=1)
    assert step(scheduler) == {"a": 24, "b": 24}
    assert not set(first.block_tables[0]) & set(second.block_tables[0])
    third = add(scheduler, "c", 24, seed=1)
    step(scheduler)
    assert third.block_tables[0][:5] == first.block_tables[0][:5]


def test_salts_do_not_share():
    scheduler = make_scheduler()
    prompt = random_tokens(0, 16)
    for name, salt in [("a", ""), ("b", "tenant"), ("c", "tenant")]:
        scheduler.add(Sequence(make_request(name, prompt, salt=salt), 0.0, list(prompt)))
        computed = step(scheduler)[name]
        assert computed == (4 if name == "c" else 16)


def test_prefix_caching_can_be_turned_off():
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "ab":
        add(scheduler, name, 16, seed=1)
        assert step(scheduler)[name] == 16


def test_newest_is_preempted_and_comes_back_first():
    offload = FakeOffloading()
    scheduler = make_scheduler(num_blocks=9, offload=offload)
    old, new = add(scheduler, "old", 16), add(scheduler, "new", 12)
    add(scheduler, "later", 12)
    assert set(step(scheduler)) == {"old", "new"}  # 4 + 3 blocks, and a spare one for "old"
    step_until(scheduler, lambda: new.phase is Phase.WAITING)
    assert offload.events[-1] == ("preempt", "new")
    assert new.num_preemptions == scheduler.num_preemptions == 1
    generated = new.output_tokens
    scheduler.finish("old")
    batch = scheduler.schedule()
    # Its prefix is still in HBM; its generated tokens are now part of its prompt.
    assert batch[0].sequence is new
    assert new.tokens == [*new.request.prompt_tokens, *generated]
    assert old.phase is Phase.FINISHED


def test_recomputed_prompt_tokens_count_again():
    scheduler = make_scheduler(num_blocks=9, enable_prefix_caching=False)
    add(scheduler, "old", 16)
    new = add(scheduler, "new", 12)
    step_until(scheduler, lambda: new.num_preemptions == 1)
    scheduler.finish("old")
    step(scheduler)
    assert new.prompt_tokens.computed == 24


@pytest.mark.parametrize("num_spare_blocks", [0, 1, 3])
def test_requests_that_fill_hbm_alone_all_finish(num_spare_blocks):
    """Several requests, each of which needs all of HBM: they finish one after the other."""
    scheduler = make_scheduler(num_blocks=8, num_spare_blocks=num_spare_blocks)
    names = [f"r{i}" for i in range(4)]
    for name in names:
        add(scheduler, name, 12, max_tokens=21)  # 32 tokens of KV: all 8 blocks
    finished = []
    for _ in range(500):
        batch = scheduler.schedule()
        for sequence in scheduler.complete(batch, [(0, 0.0)] * len(batch), now_s=0.0):
            if sequence.finish_reason():
                finished += [ended.request_id for ended in scheduler.finish(sequence.request_id)]
        scheduler.check_invariants()
    assert finished == names


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (0, 1, "the prompt is empty"),
        (100, 29, "100 prompt tokens and max_tokens=29 exceed max_model_len=128"),
        (30, 4, "need 9 blocks of 4 tokens, HBM has 8"),
        (30, 3, ""),  # 32 tokens of KV: the last sampled token needs none
    ],
)
def test_why_unservable(num_prompt, max_tokens, message):
    scheduler = make_scheduler(num_blocks=8)
    reason = scheduler.why_unservable(make_request("a", random_tokens(0, num_prompt), max_tokens=max_tokens))
    assert message in reason
    assert bool(reason) == bool(message)


def test_loading_waits_while_others_run():
    offload = FakeOffloading(8)
    scheduler = make_scheduler(offload=offload)
    loading = add(scheduler, "a", 12)
    assert step(scheduler) == {}
    assert loading.phase is Phase.LOADING
    assert scheduler.awaits_copies
    offload.num_tokens = 0
    add(scheduler, "b", 4)
    assert step(scheduler) == {"b": 4}
    scheduler.end_load("a")
    assert step(scheduler) == {"a": 4, "b": 1}
    assert loading.prompt_tokens.host == 8


def test_loaded_blocks_are_shared_only_once_loaded():
    offload = FakeOffloading(8)
    scheduler = make_scheduler(offload=offload)
    add(scheduler, "a", 12, seed=1)
    step(scheduler)
    offload.num_tokens = 0
    early = add(scheduler, "b", 12, seed=1)
    step(scheduler)
    assert early.prompt_tokens.hbm == 0
    scheduler.finish("b")
    scheduler.end_load("a")
    late = add(scheduler, "c", 12, seed=1)
    step(scheduler)
    assert late.prompt_tokens.hbm == 8


def test_whole_prompt_loaded_computes_one_token():
    scheduler = make_scheduler(offload=FakeOffloading(100))
    add(scheduler, "a", 12)
    assert step(scheduler) == {}
    scheduler.end_load("a")
    assert step(scheduler) == {"a": 1}


def test_failed_load_is_computed_and_not_tried_again():
    offload = FakeOffloading(8)
    scheduler = make_scheduler(offload=offload)
    sequence = add(scheduler, "a", 12)
    step(scheduler)
    scheduler.end_load("a", num_valid_tokens=0)
    assert step(scheduler) == {"a": 12}
    assert offload.events == [("start_load", "a")]
    assert sequence.prompt_tokens.host == 0


def test_a_loading_request_can_be_the_victim():
    offload = FakeOffloading()
    scheduler = make_scheduler(num_blocks=8, offload=offload)
    add(scheduler, "old", 16, max_tokens=17)
    step(scheduler)
    offload.num_tokens = 8
    loading = add(scheduler, "new", 8)
    step(scheduler)
    first_phase = loading.phase
    assert first_phase is Phase.LOADING
    step_until(scheduler, lambda: loading.num_preemptions == 1)
    assert loading.phase is Phase.WAITING
    assert ("preempt", "new") in offload.events
    with pytest.raises(AssertionError):  # the library was notified, and must not report this load
        scheduler.end_load("new")


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.LOADING, Phase.RUNNING])
def test_finish_in_any_phase_releases_everything(phase):
    offload = FakeOffloading(8 if phase is Phase.LOADING else 0)
    scheduler = make_scheduler(offload=offload, max_num_seqs=1 if phase is Phase.WAITING else 4)
    if phase is Phase.WAITING:
        add(scheduler, "other", 8)
    sequence = add(scheduler, "a", 12)
    step(scheduler)
    assert sequence.phase is phase
    scheduler.finish("a")
    scheduler.check_invariants()
    assert not scheduler.has("a")
    assert ("finish", "a") in offload.events
    assert "a" not in step(scheduler)


@pytest.mark.parametrize(("num_spare_blocks", "num_admitted"), [(0, 4), (1, 3), (2, 2)])
def test_admission_keeps_spare_blocks_for_those_that_run(num_spare_blocks, num_admitted):
    scheduler = make_scheduler(
        num_blocks=12, num_spare_blocks=num_spare_blocks, max_num_batched_tokens=64, max_num_seqs=8
    )
    for i in range(5):
        add(scheduler, f"r{i}", 12, seed=i)  # three blocks each
    assert len(step(scheduler)) == num_admitted
