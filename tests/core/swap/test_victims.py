"""The fewest newest requests whose blocks let the others go on."""

import itertools
import random

import numpy as np
import pytest

from tpu_offload import Candidate, RequestError, choose_victims


def candidate(name, blocks, need=0):
    return Candidate(request_id=name, block_tables=[blocks], num_new_blocks=[need])


def test_no_request_is_a_victim_while_all_can_continue():
    assert choose_victims([candidate("a", [0], 1), candidate("b", [1], 1)], num_free=[2]) == ()
    assert choose_victims([], num_free=[0]) == ()


def test_the_newest_goes_first_and_no_more_than_needed():
    requests = [candidate("a", [0, 1], 1), candidate("b", [2, 3], 1), candidate("c", [4], 1)]
    assert choose_victims(requests, num_free=[2]) == ("c",)
    assert choose_victims(requests, num_free=[1]) == ("c",)
    assert choose_victims(requests, num_free=[0]) == ("c", "b")  # c's block is too little for a and b


def test_what_a_victim_needed_itself_counts():
    requests = [candidate("a", [0], 1), candidate("b", [], 5)]
    assert choose_victims(requests, num_free=[1]) == ("b",)


def test_shared_blocks_are_free_only_with_their_last_holder():
    prompt = [0, 1, 2]
    requests = [candidate("old", [9], 2), candidate("x", [*prompt, 3]), candidate("y", [*prompt, 4])]
    assert choose_victims(requests, num_free=[0]) == ("y", "x")
    assert choose_victims(requests, num_free=[1]) == ("y",)


def test_the_last_one_is_never_a_victim():
    assert choose_victims([candidate("a", [0], 5)], num_free=[0]) == ()
    assert choose_victims([candidate("a", [0], 5), candidate("b", [1], 0)], num_free=[0]) == ("b",)


def test_every_layer_group_must_be_satisfied():
    requests = [
        Candidate(request_id="a", block_tables=[[0], [0]], num_new_blocks=[0, 1]),
        Candidate(request_id="b", block_tables=[[1], []], num_new_blocks=[0, 0]),
        Candidate(request_id="c", block_tables=[[2], [1]], num_new_blocks=[0, 0]),
    ]
    assert choose_victims(requests, num_free=[7, 0]) == ("c",)
    assert choose_victims([requests[0], requests[2], requests[1]], num_free=[7, 0]) == ("b", "c")


@pytest.mark.parametrize(
    ("candidates", "num_free", "message"),
    [
        ([], 0, "the free blocks are 0; expected an iterable of numbers, one a layer group"),
        ([], [-1], "free blocks=-1; expected an integer from 0 on"),
        (None, [0], "the candidates are None; expected an iterable of Candidates"),
        (np.array(3), [0], r"the candidates are array\(3\); expected an iterable of Candidates"),
        (["a"], [0], "a candidate is 'a'; expected a Candidate"),
    ],
)
def test_misuse_is_one_line(candidates, num_free, message):
    with pytest.raises(RequestError, match=message):
        choose_victims(candidates, num_free=num_free)


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_shortest_suffix_that_a_plain_count_accepts(seed):
    rng = random.Random(seed)
    num_groups = rng.randint(1, 2)
    requests = [
        Candidate(
            request_id=f"r{i}",
            block_tables=[rng.sample(range(20), rng.randint(0, 6)) for _ in range(num_groups)],
            num_new_blocks=[rng.randint(0, 3) for _ in range(num_groups)],
        )
        for i in range(rng.randint(1, 6))
    ]
    num_free = [rng.randint(0, 4) for _ in range(num_groups)]

    def can_go_on(kept):
        for g in range(num_groups):
            held = set(itertools.chain.from_iterable(r.block_tables[g] for r in kept))
            before = set(itertools.chain.from_iterable(r.block_tables[g] for r in requests))
            if sum(r.num_new_blocks[g] for r in kept) > num_free[g] + len(before - held):
                return False
        return True

    fitting = [n for n in range(len(requests)) if can_go_on(requests[: len(requests) - n])]
    num_victims = fitting[0] if fitting else len(requests) - 1
    expected = [r.request_id for r in reversed(requests)][:num_victims]
    assert list(choose_victims(requests, num_free=num_free)) == expected
