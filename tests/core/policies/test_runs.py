"""The order in which runs are evicted, against a plain list of them."""

import itertools
import random

import numpy as np
import pytest

from tpu_offload.core.policies import runs
from tpu_offload.core.policies.run_keys import RunKeys
from tpu_offload.core.policies.runs import Run, RunQueues
from tpu_offload.types import ChunkKey

NUM_USES = (1.0, 2.0, 4.0)


def make_run(num_chunks: int = 1) -> Run:
    keys = RunKeys([ChunkKey(b"%d" % i) for i in range(num_chunks)])
    return Run(keys, depth=0, num_resident=num_chunks, use_id=0)


def begin(queues: RunQueues, class_id: int, num_chunks: int = 1) -> Run:
    run = make_run(num_chunks)
    queues.begin(run, class_id)
    queues.place(run)
    return run


def in_order(queues: RunQueues) -> list[Run]:
    return [run for queue in queues.order() for run, ticket in queue if run.ticket == ticket]


@pytest.fixture
def queues() -> RunQueues:
    queues = RunQueues(NUM_USES)
    queues.resize(1000)
    return queues


def test_within_a_class_the_oldest_is_first_and_one_placed_again_the_last_of_its_slice(queues) -> None:
    first, second, third = (begin(queues, 0) for _ in range(3))
    queues.place(first)
    queues.reorder()
    assert in_order(queues) == [second, third, first]
    queues.advance(100_000)
    young = begin(queues, 0)
    queues.place(second)
    queues.reorder()
    assert in_order(queues) == [third, first, second, young], "no run is younger because it was placed again"


def test_a_new_lifetime_is_not_in_the_old_slice(queues) -> None:
    run, other = begin(queues, 0), begin(queues, 0)
    queues.advance(50_000)
    queues.end(run, 1, used=True)
    queues.begin(run, 0)
    queues.place(run)
    queues.reorder()
    assert in_order(queues) == [other, run]
    queues.check_invariants([run, other])


def test_a_run_placed_in_an_empty_queue_has_its_place_at_once(queues) -> None:
    """Not only after the next sort: else what is worth more would be evicted before it."""
    waiting = make_run()
    queues.begin(waiting, 0)
    queues.advance(50_000)
    young = begin(queues, 2)
    queues.reorder()
    assert in_order(queues) == [young]
    queues.place(waiting)
    first = queues.least()
    assert first is not None
    assert first[0][0] is waiting, "what is worth more would be evicted before it"
    first.clear()
    assert in_order(queues) == [young]
    queues.place(waiting)
    assert in_order(queues) == [waiting, young], "once, though its queue was emptied and filled again"


def test_the_class_that_is_used_again_is_last(queues) -> None:
    """Class 0 is used again soon and always, class 2 never, though the prior says the opposite."""
    for _ in range(300):
        gone, back = begin(queues, 2), begin(queues, 0)
        queues.advance(100)
        queues.end(back, 1, used=True)
        queues.advance(5000)
        queues.end(gone, 1, used=False)
        back.ticket += 1
        gone.ticket += 1
    queues.advance(5000)
    never, soon = begin(queues, 2), begin(queues, 0)
    queues.advance(10)
    queues.reorder()
    assert in_order(queues) == [never, soon]


def test_the_age_of_a_slice_is_that_of_what_is_left_of_it(queues) -> None:
    """Class 0 is always used at an age of 22,000, class 1 every other time: the next use of the older run is near."""
    queues.resize(160_000)
    queues.advance(runs.MIN_SLICE)  # the slices from now on have 10,000
    gone = begin(queues, 0)
    queues.advance(9000)
    left = begin(queues, 0)
    for i in range(300):
        queues.lifetimes.end(0, 1, 22_000, used=True)
        queues.lifetimes.end(1, 1, 22_000, used=i % 2 == 0)
    queues.advance(1000)
    queues.advance(12_000)
    queues.end(gone, 1, used=True)
    gone.ticket += 1
    queues.advance(3000)
    young = begin(queues, 1)
    queues.advance(5000)
    queues.reorder()
    assert queues.now - left.time == 21_000, "but the middle of its slice is 25,000 old"
    assert in_order(queues) == [young, left]
    queues.check_invariants([left, young])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_chunks", [10, 1000, 20_000])
def test_queues_hold_what_a_plain_list_holds(queues, seed, num_chunks) -> None:
    """Each run once, each class in the order of its slices, and by value from one queue to the next."""
    rng = random.Random(seed)
    queues.resize(num_chunks)
    lives: list[Run] = []
    placed: list[tuple[Run, int]] = []  # the plain list, and the class
    now = 0
    for i in range(3000):
        step = rng.randint(1, 60)
        queues.advance(step)
        now += step
        run = begin(queues, rng.randrange(3), rng.randint(1, 9))
        lives.append(run)
        placed.append((run, run.class_id))
        for _ in range(rng.randint(0, 2)):
            run = rng.choice(lives[-200:])
            what = rng.random()
            if what < 0.5:
                queues.end(run, len(run.keys), used=what < 0.3)
                placed = [entry for entry in placed if entry[0] is not run]
                if what < 0.3:
                    queues.begin(run, rng.randrange(3))
                    queues.place(run)
                    placed.append((run, run.class_id))
                else:
                    lives.remove(run)
                    run.ticket += 1
            elif what < 0.7:
                queues.place(run)
        if i % 500 == 499:
            check(queues, lives, [run for run, _ in placed])


def check(queues: RunQueues, lives: list[Run], placed: list[Run]) -> None:
    queues.reorder()
    queues.check_invariants(lives)
    found = in_order(queues)
    assert len(found) == len(placed)
    assert {id(run) for run in found} == {id(run) for run in placed} == queues.waiting()
    times: dict[int, list[int]] = {}  # of the chunks of each slice
    for run in lives:
        times.setdefault(id(queues.slice_of(run)), []).extend([run.time] * len(run.keys))
    worths = [worth_of(queues, run, times[id(queues.slice_of(run))]) for run in found]
    assert worths == sorted(worths)
    for class_id in range(3):
        starts = [queues.slice_of(run).start for run in sorted(placed, key=lambda run: run.time)]
        assert starts == sorted(starts), "a slice has runs of another time"
        assert class_id in {run.class_id for run in found}
    for run in found:
        assert queues.slice_of(run).start <= run.time


def worth_of(queues: RunQueues, run: Run, times: list[int]) -> float:
    """The value of a run: by the mean age of what is left of its slice."""
    assert run.time <= queues.now
    lifetimes = queues.lifetimes
    return lifetimes.densities[lifetimes.first_density(queues.now - sum(times) // len(times)) + run.class_id]


def test_slices_stay_few_and_young_ones_are_not_merged(queues) -> None:
    queues.resize(100_000)
    size = 100_000 // runs.SLICES
    for _ in range(5000):
        queues.advance(size)
    starts = [part.start for part in queues.slices]
    assert len(starts) < 120
    widths = [b - a for a, b in itertools.pairwise(starts)]
    ages = [queues.now - start for start in starts[1:]]
    assert all(width <= max(size, age / 3) for width, age in zip(widths, ages, strict=True)), "too coarse for its age"
    assert widths[-8:] == [size] * 8


def test_runs_of_merged_slices_are_still_found(queues) -> None:
    early = [begin(queues, i % 3) for i in range(9)]
    for i in range(2000):
        queues.advance(300)
        early.append(begin(queues, i % 3))
    assert len(queues.slices) < 150
    queues.reorder()
    assert {id(run) for run in in_order(queues)} == {id(run) for run in early}
    for queue in queues.order():
        times = [run.time for run, _ in queue]
        assert times == sorted(times), "the oldest of a merged queue is first"
    queues.check_invariants(early)
    for run in early:
        queues.end(run, 1, used=False)
        run.ticket += 1
    queues.check_invariants([])


def test_stale_entries_are_purged_in_time(queues) -> None:
    """Thousands of short lifetimes: the number of entries stays a small multiple of the number of runs."""
    lives = [begin(queues, 0) for _ in range(100)]
    rng, most = random.Random(0), 0
    for _ in range(50_000):
        queues.advance(1)
        run = rng.choice(lives)
        queues.end(run, 1, used=True)
        queues.begin(run, 1)
        queues.place(run)
        most = max(most, queues.num_entries())
    assert most < 100 + 2 * runs.LEARN_EVERY + runs.MIN_SLICE


def test_queues_that_have_become_empty_do_not_stay() -> None:
    """A slice has queues of the classes that await eviction in it, not of all that ever did."""
    queues = RunQueues(range(1, 101))
    queues.resize(1000)
    for i in range(3000):
        run = begin(queues, i % 100)
        queues.advance(runs.LEARN_EVERY // 100)
        queues.end(run, 1, used=True)
        run.end_entries()
        assert sum(len(time_slice.queues) for time_slice in queues.slices) <= 100 + runs.MIN_SLICE
    queues.check_invariants([])


def test_runs_of_parts_are_in_the_queue_of_their_class_until_the_parts_differ() -> None:
    queues = RunQueues(NUM_USES, parts=[0, 0])
    queues.resize(1000)
    one, other = begin(queues, 3), begin(queues, 4)
    (queue,) = queues.order()
    assert [run for run, _ in queue] == [one, other]
    used = np.array([[1.0], [0.0]])  # often the first part, never the second, at one age
    queues.lifetimes.part_rates.observe(100 * used, np.ones_like(used), used)
    queues.advance(runs.LEARN_EVERY)
    queues.reorder()
    assert not queues.is_in(one, queue)
    queues.place(one)
    queues.change_class(other, 3)
    queues.place(other)
    assert in_order(queues) == [one, other]
    (queue,) = (queue for queue in queues.order() if (one, one.ticket) in queue)
    assert queues.is_in(one, queue)
    assert queues.is_in(other, queue)
    queues.check_invariants([one, other])


def test_a_run_that_grows_is_counted_in_its_new_part() -> None:
    queues = RunQueues(NUM_USES, parts=[0, 0])
    run = begin(queues, 3, 4)
    queues.change_class(run, 4)
    queues.check_invariants([run])
    assert run.class_id == 4
