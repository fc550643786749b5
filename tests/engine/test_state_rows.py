"""Rows of states and their prefix cache, without a model."""

import pytest

from tests.engine.helpers import cached_hashes, make_request, random_tokens
from tests.engine.test_kv_blocks import TOKENS, hybrid, serve_alone
from tests.engine.test_scheduler import add, step, step_until
from tests.inside.engine import kv_blocks, preempt_sequence, row_manager, state_rows
from tpu_offload import BlockHash
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.sequence import Phase, Sequence


def states_of(scheduler):
    return state_rows(kv_blocks(scheduler))


def steps_of(scheduler, sequence, *, num_tokens):
    """Runs a sequence alone until so many of its tokens are computed; returns the start, end and rows of each step."""
    steps = []
    while sequence.num_computed_tokens < num_tokens:
        (run,) = batch = scheduler.schedule()
        steps.append((run.start, run.end, *run.state_rows))
        scheduler.complete(batch, [(0, 0.0)], now_s=1.0)
        scheduler.check_invariants()
    return steps


def test_a_step_from_a_boundary_writes_a_new_row_and_others_write_their_own():
    scheduler = hybrid(has_states=True, max_num_batched_tokens=6, enable_prefix_caching=False)
    sequence = add(scheduler, "a", 11, max_tokens=20)
    steps = steps_of(scheduler, sequence, num_tokens=17)
    assert [step[:2] for step in steps] == [(0, 6), (6, 8), (8, 11), *((n, n + 1) for n in range(11, 17))]
    first, second, third, *decoding = [step[2:] for step in steps]
    assert first[0] == NULL_BLOCK
    assert second == (first[1], first[1]), "it ends with the block: the boundary below the prompt's last token"
    assert third[0] == first[1] != third[1]
    assert decoding[0] == (third[1], third[1])
    assert decoding[1][0] == third[1] != decoding[1][1], "from 12 tokens on"
    assert decoding[2] == (decoding[1][1],) * 2
    assert sequence.states == {3: decoding[4][1], 4: decoding[5][1]}
    assert sequence.state_table == [NULL_BLOCK] * 3 + [decoding[4][1], decoding[5][1]]


def test_steps_end_at_every_boundary_asked_for():
    scheduler = hybrid(has_states=True, max_num_batched_tokens=32)
    sequence = add(scheduler, "a", 30)
    sequence.junctions |= {8, 20}
    steps = steps_of(scheduler, sequence, num_tokens=30)
    assert [step[:2] for step in steps] == [(0, 8), (8, 20), (20, 28), (28, 30)]
    states = states_of(scheduler)
    cached = [i for i, block_hash in enumerate(sequence.block_hashes) if states.get(block_hash) is not None]
    assert cached == [1, 4, 6]


def test_without_states_no_step_is_clipped():
    scheduler = hybrid(max_num_batched_tokens=32)
    sequence = add(scheduler, "a", 30)
    sequence.junctions |= {8, 20}
    assert steps_of(scheduler, sequence, num_tokens=30) == [(0, 30, NULL_BLOCK, NULL_BLOCK)]


@pytest.mark.parametrize("budget", [5, 64])
def test_an_equal_prompt_finds_all_but_its_last_block(budget):
    scheduler = hybrid(10, has_states=True, max_num_batched_tokens=budget)
    for num_prompt in (30, 32, 33, 3):
        serve_alone(scheduler, "first", TOKENS[:num_prompt])
        assert serve_alone(scheduler, "again", TOKENS[:num_prompt]).prompt_tokens.hbm == (num_prompt - 1) // 4 * 4
        scheduler.invalidate_prefixes()


@pytest.mark.parametrize("num_answer", range(8, 13))
def test_the_next_turn_finds_all_that_the_last_one_computed(num_answer):
    scheduler = hybrid(has_states=True)
    first = serve_alone(scheduler, "first", TOKENS[:30], max_tokens=num_answer)
    second = serve_alone(scheduler, "second", [*first.tokens, *TOKENS[:9]])
    assert second.prompt_tokens.hbm == (30 + num_answer - 1) // 4 * 4
    other = serve_alone(scheduler, "other", [*TOKENS[:30], 1, 2, 3])
    assert other.prompt_tokens.hbm == 28, "the prompt's own end"
    elsewhere = serve_alone(scheduler, "elsewhere", [*TOKENS[:24], 7, 7])
    assert elsewhere.prompt_tokens.hbm == 0, "there is no state after 24 tokens"


def test_the_third_prompt_that_begins_alike_finds_the_state_where_they_part():
    scheduler = hybrid(has_states=True)
    serve_alone(scheduler, "first", TOKENS[:30])
    found = [serve_alone(scheduler, f"{i}", [*TOKENS[:21], *random_tokens(i, 9)]) for i in (2, 3)]
    assert [(sequence.junctions, sequence.prompt_tokens.hbm) for sequence in found] == [({20}, 0), (set(), 20)]


def test_the_least_recently_used_states_are_evicted():
    scheduler = hybrid(has_states=True, max_num_seqs=2, num_states=4, num_blocks=200)
    prompts = [random_tokens(i, 10) for i in range(5)]
    for i, prompt in enumerate(prompts):  # each leaves a state
        serve_alone(scheduler, f"a{i}", prompt)
    hits = [serve_alone(scheduler, f"b{i}", prompts[i]).prompt_tokens.hbm for i in (3, 4, 0)]
    assert hits == [8, 8, 0]


def test_a_preempted_request_finds_what_it_had_computed():
    scheduler = hybrid(has_states=True)
    sequence = add(scheduler, "a", 30, max_tokens=40)
    step_until(scheduler, lambda: len(sequence.tokens) == 50)
    preempt_sequence(scheduler, sequence)
    scheduler.check_invariants()
    assert states_of(scheduler).num_free == states_of(scheduler).total
    assert step(scheduler) == {"a": 2}  # 49 tokens were computed
    assert sequence.prompt_tokens.hbm == 30


def test_a_request_that_is_computed_again_stops_at_both_boundaries():
    """At the end of its prompt, and at the last one of what it had generated."""
    scheduler = hybrid(has_states=True)
    sequence = add(scheduler, "a", 10, max_tokens=40)
    step_until(scheduler, lambda: len(sequence.tokens) == 23)
    preempt_sequence(scheduler, sequence)
    scheduler.invalidate_prefixes()
    steps = steps_of(scheduler, sequence, num_tokens=23)
    assert [step[:2] for step in steps] == [(0, 8), (8, 20), (20, 23)]


def test_what_was_computed_before_a_reset_is_not_cached():
    scheduler = hybrid(has_states=True)
    sequence = add(scheduler, "a", 13, max_tokens=40)
    step_until(scheduler, lambda: len(sequence.tokens) == 16)
    scheduler.invalidate_prefixes()
    step_until(scheduler, lambda: len(sequence.tokens) == 30)
    scheduler.finish("a")
    assert not cached_hashes(row_manager(states_of(scheduler)))
    assert serve_alone(scheduler, "b", sequence.tokens).prompt_tokens.hbm == 0


def test_a_load_that_ends_early_leaves_no_state_to_continue_from():
    scheduler = hybrid(has_states=True)
    sequence = Sequence(make_request("a", TOKENS[:30]), 0.0, list(TOKENS[:30]))
    blocks = kv_blocks(scheduler)
    assert blocks.grant(sequence, 30, start=20)
    assert [blocks.can_continue(sequence, n) for n in (0, 16, 20)] == [False, False, True]


@pytest.mark.parametrize("harm", ["owned twice", "two writers", "unfinished", "lost", "kept", "hash", "not held"])
def test_the_invariants_can_fail(harm):
    scheduler = hybrid(has_states=True, max_num_batched_tokens=8)
    first, second = add(scheduler, "a", 10, max_tokens=30), add(scheduler, "b", 10, max_tokens=30)
    step_until(scheduler, lambda: first.num_computed_tokens == 19)
    manager, position = row_manager(states_of(scheduler)), max(first.states)
    assert max(second.states) == position
    if harm == "owned twice":
        second.states[position - 1] = first.states[position]
    elif harm == "two writers":
        manager.share([first.states[position]])
        manager.free([second.states[position]])
        second.states[position] = first.states[position]
    elif harm == "unfinished":
        manager.register(first.states[position], BlockHash(b"hash"))
        first.block_hashes[position:] = [BlockHash(b"hash")]
    elif harm == "lost":
        manager.free([first.states.pop(position)])
    elif harm == "kept":
        first.states[0] = manager.allocate(1)[0]
    elif harm == "hash":
        manager.register(first.states[position - 1], BlockHash(b"other"))
    else:
        manager.allocate(1)
    assert first.phase is second.phase is Phase.RUNNING
    with pytest.raises(AssertionError):
        scheduler.check_invariants()
