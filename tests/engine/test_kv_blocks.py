"""Block tables and prefix cache of several layer groups, without a model: a map of contents stands for the arrays."""

import dataclasses
import itertools
import random

import pytest

from tests.engine.helpers import SMALL_ENGINE, cached_hashes, make_request, random_tokens
from tests.engine.test_scheduler import add, make_scheduler, step, step_until
from tests.inside.engine import active_sequences, block_manager, kv_blocks, preempt_sequence, state_rows
from tpu_offload import BlockHash
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.kv_blocks import KVBlocks, num_skipped_blocks
from tpu_offload.engine.scheduler import Scheduler
from tpu_offload.engine.sequence import Phase, Sequence
from tpu_offload.hashing import BlockHasher

BLOCK_SIZE = SMALL_ENGINE.block_size


def hybrid(*windows, has_states=False, **changes):
    config = dataclasses.replace(SMALL_ENGINE, **changes)
    hasher = BlockHasher(b"model", block_size=BLOCK_SIZE)
    return Scheduler(config, hasher, offload=None, windows=(0, *windows), has_states=has_states)


def seen_from(position, window):
    """The first token that one at `position` attends to."""
    return max(0, position - window + 1) if window else 0


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_what_is_skipped_is_needed_by_no_token_and_no_hit(window, block_size):
    for computed in range(60):
        skipped = num_skipped_blocks(computed, window=window, block_size=block_size)
        boundary = computed // block_size * block_size
        assert skipped * block_size <= seen_from(computed, window)
        assert skipped == seen_from(boundary, window) // block_size


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("budget", [1, 3, 4, 8])
def test_the_most_blocks_of_a_request(block_size, window, budget):
    """Reached by the largest step from the worst offset, and never exceeded."""
    blocks = KVBlocks(
        num_blocks=200, block_size=block_size, windows=(0, window), max_step_tokens=budget, prefix_caching=False
    )
    most = blocks.most_blocks(60)
    held = []
    for offset, chunk in itertools.product(range(1, block_size + 1), range(1, budget + 1)):
        sequence = Sequence(make_request("a", random_tokens(0, 60)), 0.0, list(random_tokens(0, 60)))
        sequence.phase = Phase.RUNNING
        while sequence.num_computed_tokens < 60:
            assert blocks.grant(sequence, 60, start=sequence.num_computed_tokens)
            held.append(blocks.total - blocks.num_free)
            left = 60 - sequence.num_computed_tokens
            sequence.num_computed_tokens += min(left, chunk if sequence.num_computed_tokens else offset)
            blocks.release_skipped([sequence])
        blocks.release(sequence, num_valid_tokens=0)
    assert max(held) == most


def test_a_window_leaves_null_blocks_behind_as_its_sequence_runs():
    scheduler = hybrid(10, 10, max_num_batched_tokens=8)
    sequence = add(scheduler, "a", 30, max_tokens=30)
    while len(sequence.tokens) < 50:
        (run,) = batch = scheduler.schedule()
        full, *windows = sequence.block_tables
        assert NULL_BLOCK not in full
        first = max(0, run.start // 4 - 3)
        for table in windows:
            assert table[:first] == [NULL_BLOCK] * first
            assert NULL_BLOCK not in table[first : -(-run.end // 4)]
            assert len(table) <= -(-(run.start + 8) // 4)
        scheduler.complete(batch, [(0, 0.0)], now_s=1.0)
        scheduler.check_invariants()
    assert kv_blocks(scheduler).num_free == 64 - 13 - 2 * 4


def serve_alone(scheduler, name, prompt, *, max_tokens=1):
    """Serves a request of these tokens; returns its sequence."""
    request = make_request(name, tuple(prompt), max_tokens=max_tokens)
    sequence = Sequence(request, 0.0, list(prompt))
    scheduler.add(sequence)
    step_until(scheduler, lambda: len(sequence.output_tokens) == max_tokens)
    scheduler.finish(name)
    scheduler.check_invariants()
    return sequence


TOKENS = random_tokens(5, 90)


@pytest.mark.parametrize("budget", [8, 64])
def test_an_equal_prompt_finds_all_but_its_last_block(budget):
    scheduler = hybrid(10, 10, max_num_batched_tokens=budget)
    for num_prompt in (30, 32, 33, 3):
        serve_alone(scheduler, "first", TOKENS[:num_prompt])
        assert serve_alone(scheduler, "again", TOKENS[:num_prompt]).prompt_tokens.hbm == (num_prompt - 1) // 4 * 4
        scheduler.invalidate_prefixes()


@pytest.mark.parametrize("num_answer", range(8, 17))
def test_the_next_turn_finds_all_that_the_last_one_computed(num_answer):
    scheduler = hybrid(10, 10)
    first = serve_alone(scheduler, "first", TOKENS[:30], max_tokens=num_answer)
    second = serve_alone(scheduler, "second", [*first.tokens, *TOKENS[:9]])
    assert second.prompt_tokens.hbm == (30 + num_answer - 1) // 4 * 4
    other = serve_alone(scheduler, "other", [*TOKENS[:30], 1, 2, 3])
    assert other.prompt_tokens.hbm == 28, "the prompt's own end"


def test_of_a_window_only_what_a_hit_can_use_is_cached():
    """A prefix that ends elsewhere is no hit, however much of it is cached with full attention."""
    scheduler = hybrid(10)
    serve_alone(scheduler, "first", TOKENS[:30], max_tokens=26)
    manager = block_manager(kv_blocks(scheduler))
    assert len(cached_hashes(manager, 1)) == 3 + 3
    assert len(cached_hashes(manager, 0)) == 55 // 4
    assert serve_alone(scheduler, "short", [*TOKENS[:24], 7, 7]).prompt_tokens.hbm == 0


def test_a_preempted_request_finds_what_it_had_computed():
    scheduler = hybrid(10, 10, num_blocks=200)
    sequence = add(scheduler, "a", 30, max_tokens=40)
    step_until(scheduler, lambda: len(sequence.tokens) == 50)
    preempt_sequence(scheduler, sequence)
    scheduler.check_invariants()
    assert step(scheduler) == {"a": 2}  # 49 tokens were computed
    assert sequence.prompt_tokens.hbm == 30


def test_evicting_one_block_of_a_window_shortens_the_hit():
    scheduler = hybrid(10, 10, num_blocks=40)
    serve_alone(scheduler, "first", TOKENS[:30], max_tokens=12)
    hashes: list[BlockHash] = []
    BlockHasher(b"model", block_size=BLOCK_SIZE).extend(hashes, list(TOKENS[:30]))
    blocks = kv_blocks(scheduler)
    assert [list(found) for found in blocks.find_prefix(hashes)] == [list(range(7)), [4, 5, 6], [4, 5, 6]]
    manager = block_manager(blocks)
    block_id = manager.get(2, hashes[5])
    assert block_id is not None
    manager.share([other for other in range(1, manager.num_blocks + 1) if other != block_id])
    assert manager.allocate(1) == [block_id], "the only one that is free"
    assert blocks.find_prefix(hashes) == [{}, {}, {}]


@pytest.mark.parametrize("seed", range(20))
def test_a_hit_is_the_longest_that_all_groups_have(seed):
    """Whatever has been evicted from each of them."""
    rng = random.Random(seed)
    windows = (0, 10, 6, 13)
    blocks = KVBlocks(num_blocks=200, block_size=BLOCK_SIZE, windows=windows, max_step_tokens=8)
    hashes = [BlockHash(bytes([i])) for i in range(30)]
    for group_id, block_hash in itertools.product(range(4), hashes[: rng.randint(15, 30)]):
        (block_id,) = block_manager(blocks).allocate(1)
        if rng.random() < 0.8 or not group_id:
            block_manager(blocks).register(block_id, block_hash, group_id=group_id)
    found = blocks.find_prefix(hashes)
    assert [list(by_position) for by_position in found] == naive_prefix(blocks, windows, hashes)


def test_one_pool_serves_all_groups():
    """Long windows need as many blocks as full attention; short ones leave most to it."""
    for window, num_tokens in ((100, 100), (4, 190)):
        scheduler = hybrid(window, max_model_len=300, num_blocks=60, max_num_batched_tokens=32)
        requests = [make_request("a", random_tokens(0, n), max_tokens=1) for n in (num_tokens, num_tokens + 40)]
        assert [bool(scheduler.why_unservable(request)) for request in requests] == [False, True]
        assert len(serve_alone(scheduler, "a", requests[0].prompt_tokens).tokens) == num_tokens + 1


@pytest.mark.parametrize("harm", ["owned twice", "hole", "needed", "kept", "hash", "written by two", "not held"])
def test_the_invariants_can_fail(harm):
    scheduler = hybrid(10, 10, max_num_batched_tokens=8)
    first, second = add(scheduler, "a", 40, max_tokens=30), add(scheduler, "b", 40, max_tokens=30)
    step_until(scheduler, lambda: len(second.tokens) == 45)
    manager, table = block_manager(kv_blocks(scheduler)), first.block_tables[1]
    if harm == "owned twice":
        first.block_tables[2][-1] = table[-1]
    elif harm == "hole":
        table[-2] = NULL_BLOCK
    elif harm == "needed":
        manager.free([block_id for block_id in table[:-1] if block_id != NULL_BLOCK])
        table[:-1] = [NULL_BLOCK] * (len(table) - 1)
    elif harm == "kept":
        table[: len(table) - 1] = manager.allocate(len(table) - 1)
    elif harm == "hash":
        manager.register(table[-1], first.block_hashes[0], group_id=2)
    elif harm == "written by two":
        manager.share(table[-1:])
        manager.free([second.block_tables[1][-1]])
        second.block_tables[1][-1] = table[-1]
        second.block_tables[1][len(table) :] = []
    else:
        manager.allocate(1)
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


class Contents:
    """What each place of the arrays holds: the layer group, and the tokens up to the one whose KV is there."""

    def __init__(self, windows):
        self.windows = windows
        self.places = {}
        self.states = {}  # by row, the tokens that the state is of
        self.num_resumed = 0

    def place(self, sequence, group_id, position):
        block_id = sequence.block_tables[group_id][position // BLOCK_SIZE]
        assert block_id != NULL_BLOCK
        return block_id, position % BLOCK_SIZE

    def run(self, copies, batch):
        """Copies, writes the KV of a step, then reads what its tokens attend to."""
        for source, target in copies:
            for offset in range(BLOCK_SIZE):
                self.places[target, offset] = self.places.get((source, offset))
        self.run_states(batch)
        for group_id in range(len(self.windows)):
            for run in batch:
                for position in range(run.start, run.end):
                    tokens = hash((run.sequence.request.cache_salt, *run.sequence.tokens[: position + 1]))
                    self.places[self.place(run.sequence, group_id, position)] = group_id, tokens
        for group_id, window in enumerate(self.windows):
            for run in batch:
                for position in range(seen_from(run.start, window), run.end):
                    tokens = hash((run.sequence.request.cache_salt, *run.sequence.tokens[: position + 1]))
                    assert self.places[self.place(run.sequence, group_id, position)] == (group_id, tokens)

    def run_states(self, batch):
        """Reads the states before the spans, and writes those after them in reverse order: no row is for two."""
        for run in batch:
            source, _ = run.state_rows
            if source != NULL_BLOCK:
                assert self.states[source] == self.text(run, run.start)
                self.num_resumed += 1
            else:
                assert run.start == 0 or run.state_rows == (NULL_BLOCK, NULL_BLOCK)
        for run in reversed(batch):
            self.states[run.state_rows[1]] = self.text(run, run.end)

    def text(self, run, num_tokens):
        assert num_tokens <= len(run.sequence.tokens)
        return run.sequence.request.cache_salt, *run.sequence.tokens[:num_tokens]


def naive_prefix(blocks, windows, hashes):
    """The definition of a hit, longest first."""
    states, manager = state_rows(blocks), block_manager(blocks)
    for n in range(len(hashes), 0, -1):
        ranges = [range(seen_from(n * BLOCK_SIZE, window) // BLOCK_SIZE, n) for window in windows]
        found = all(manager.get(g, hashes[i]) is not None for g, needed in enumerate(ranges) for i in needed)
        if found and (not states or states.get(hashes[n - 1]) is not None):
            return [*map(list, ranges), *([[n - 1]] if states else [])]
    return [[] for _ in range(len(windows) + bool(states))]


class RandomLife:
    """Random requests, with shared prefixes, further turns, samples, preemptions, aborts and resets."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        windows = self.rng.choice([(), (10,), (10, 10), (5, 5, 5), (1,), (33, 33)])
        has_states = self.rng.random() < 0.5
        self.scheduler = hybrid(
            *windows,
            has_states=has_states,
            num_states=self.rng.choice([8, 8, 20]),
            num_blocks=self.rng.choice([40, 60, 100]),
            max_num_batched_tokens=self.rng.choice([5, 16, 40]),
            enable_prefix_caching=self.rng.random() < 0.9,
            num_spare_blocks=self.rng.choice([0, 1]),
        )
        self.windows = (0, *windows)
        self.contents = Contents(self.windows)
        self.reachable = set()  # hashes of blocks that a hit may need of a window
        self.texts = [random_tokens(i, 40) for i in range(3)]
        self.counts = {"hit": 0, "forked": 0}
        release = kv_blocks(self.scheduler).release

        def recorded(sequence, *, num_valid_tokens):
            if num_valid_tokens:
                self.add_reachable(sequence.block_hashes, num_valid_tokens // BLOCK_SIZE)
            release(sequence, num_valid_tokens=num_valid_tokens)

        kv_blocks(self.scheduler).release = recorded

    def add_reachable(self, hashes, end):
        for group_id, window in enumerate(self.windows):
            first = seen_from(end * BLOCK_SIZE, window) // BLOCK_SIZE
            self.reachable |= {(group_id, block_hash) for block_hash in hashes[first:end] if window}

    def add_request(self, number):
        rng = self.rng
        prompt = rng.choice(self.texts)[: rng.randint(1, 60)] + random_tokens(1000 + number, rng.choice([0, 0, 1, 9]))
        prompt = prompt[:90] or (1,)
        request = make_request(
            f"r{number}", prompt, max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 3]), salt=rng.choice(["", "", "x"])
        )
        if not self.scheduler.why_unservable(request):
            self.scheduler.add(*(Sequence(request, 0.0, list(prompt), i) for i in range(request.sampling.n)))

    def step(self):
        scheduler, rng = self.scheduler, self.rng
        if rng.random() < 0.03 and active_sequences(scheduler):
            preempt_sequence(scheduler, rng.choice(active_sequences(scheduler)))
        if rng.random() < 0.01:
            scheduler.invalidate_prefixes()
            self.reachable.clear()
        batch = scheduler.schedule()
        copies = scheduler.take_copies()
        self.counts["forked"] += bool(copies)
        self.contents.run(copies, batch)
        for run in batch:
            sequence = run.sequence
            self.add_reachable(sequence.block_hashes, (sequence.num_prompt_tokens - 1) // BLOCK_SIZE)
            self.counts["hit"] += sequence.prompt_tokens.hbm
        sampled = [(rng.randint(0, 2), 0.0) for _ in batch]
        for sequence in scheduler.complete(batch, sampled, now_s=0.0):
            if sequence.finish_reason() or rng.random() < 0.01:
                scheduler.finish(sequence.sequence_id)
                self.texts.append(tuple(sequence.tokens))
        scheduler.check_invariants()
        self.check_cache()

    def check_cache(self):
        blocks = kv_blocks(self.scheduler)
        states, manager = state_rows(blocks), block_manager(blocks)
        for group_id, window in enumerate(self.windows):
            if window:
                cached = {(group_id, block_hash) for block_hash in cached_hashes(manager, group_id)}
                assert cached <= self.reachable, "no hit needs what is cached of a window"
        hashes: list[BlockHash] = []
        BlockHasher(b"model", block_size=BLOCK_SIZE).extend(hashes, list(self.rng.choice(self.texts)))
        found = blocks.find_prefix(hashes)
        assert [sorted(by_position) for by_position in found] == naive_prefix(blocks, self.windows, hashes)
        for group_id, by_position in enumerate(found):
            for i, block_id in by_position.items():
                if group_id == len(self.windows):
                    assert states is not None
                    assert states.get(hashes[i]) == block_id
                else:
                    assert manager.key_of(block_id) == (group_id, hashes[i])


@pytest.mark.parametrize("seed", range(60))
def test_random_lives_read_what_they_wrote(seed):
    life = RandomLife(seed)
    for number in range(3000):
        if number < 250 and life.rng.random() < 0.15:
            life.add_request(number)
        life.step()
        if number > 250 and not life.scheduler.num_waiting + life.scheduler.num_active:
            break
    else:
        raise AssertionError("no progress")
    blocks = kv_blocks(life.scheduler)
    assert blocks.num_free == blocks.total
    if rows := state_rows(blocks):
        assert rows.num_free == rows.total
        COUNTS["state hit"] += life.counts["hit"]
        COUNTS["resumed"] += life.contents.num_resumed
    COUNTS["hit"] += life.counts["hit"] * (len(life.windows) > 1)
    COUNTS["forked"] += life.counts["forked"]
    COUNTS["preempted"] += life.scheduler.num_preemptions
    COUNTS["runs"] += 1


COUNTS = dict.fromkeys(("hit", "state hit", "resumed", "forked", "preempted", "runs"), 0)


@pytest.mark.wide
def test_those_lives_were_eventful():
    if COUNTS["runs"] < 60:
        pytest.skip("not all of the random lives were lived")
    assert COUNTS["hit"] > 1000, COUNTS
    assert COUNTS["state hit"] > 1000, COUNTS
    assert COUNTS["resumed"] > 1000, COUNTS
    assert COUNTS["forked"] > 50, COUNTS
    assert COUNTS["preempted"] > 200, COUNTS


def test_schedulers_without_windows_have_one_group():
    assert kv_blocks(make_scheduler()).find_prefix([]) == [{}]
