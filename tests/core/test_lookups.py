"""Which tokens count as looked up, and which as found: the hit rate of the host tier."""

import pytest

from tests.core.fakes import BLOCK_SIZE, FakeEngine, tokens
from tpu_offload import RequestError, RequestLimits
from tpu_offload.types import BlockHash


class Lookups:
    """Counts from its creation on: looked up, found, taken."""

    def __init__(self, engine: FakeEngine) -> None:
        self.scheduler = engine.scheduler
        self.before: tuple[int, ...] = (0, 0, 0)
        self.before = self()

    def __call__(self) -> tuple[int, ...]:
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        now = stats.looked_up_tokens, stats.found_tokens, stats.matched_tokens
        return tuple(one - other for one, other in zip(now, self.before, strict=True))


def hashes_of(engine: FakeEngine, prompt: list[int]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, prompt)
    return hashes


def match(engine: FakeEngine, name: str, num_tokens: int, *, hbm: int = 0, **how) -> int:
    hashes = hashes_of(engine, tokens(num_tokens))
    return engine.scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=hbm, **how).num_tokens


def warm(num_tokens: int = 16, **settings) -> FakeEngine:
    """An engine with the first tokens of a prompt in its host tier."""
    engine = FakeEngine(**settings)
    engine.serve("warm", tokens(num_tokens))
    return engine


def test_a_prompt_served_twice():
    engine = FakeEngine()
    lookups = Lookups(engine)
    engine.serve("a", tokens(18))
    assert lookups() == (18, 0, 0)
    engine.serve("b", tokens(18))
    assert lookups() == (36, 16, 16)


def test_the_token_that_is_always_computed_is_not_found():
    engine = warm(16)
    lookups = Lookups(engine)
    engine.serve("b", tokens(16))
    assert lookups() == (16, 15, 15)


def test_tokens_in_hbm_are_not_looked_up():
    engine = warm(32)
    lookups = Lookups(engine)
    match(engine, "b", 40, hbm=24)
    engine.scheduler.finish("b")
    assert lookups() == (16, 8, 0)


def test_only_the_last_of_many_matches_counts_and_only_when_it_is_admitted():
    engine = FakeEngine()
    engine.add("a", tokens(16))
    engine.step({"a": 16})
    lookups = Lookups(engine)
    for _ in range(3):  # its prefix is being saved
        assert match(engine, "b", 18) == 0
        engine.scheduler.release("b")
        engine.step()
    engine.settle()
    for _ in range(3):  # it is there, and no blocks are to be had
        assert match(engine, "b", 18) == 16
        engine.scheduler.release("b")
        engine.step()
    assert lookups() == (0, 0, 0)
    assert match(engine, "b", 18) == 16
    engine.scheduler.admit("b", [engine.grant(5)], num_loaded_tokens=16)
    assert lookups() == (18, 16, 16)


def test_an_admission_counts_once_even_if_repeated():
    """vLLM reports a request's blocks again when its load has finished, without another match."""
    engine = warm()
    lookups = Lookups(engine)
    num_tokens = match(engine, "b", 18)
    blocks = engine.grant(5)
    engine.scheduler.admit("b", [blocks], num_loaded_tokens=num_tokens)
    worker = engine.workers[0]
    worker.begin_step(engine.scheduler.plan_step([]))
    engine.scheduler.apply(worker.report(worker.finish()))
    engine.scheduler.admit("b", [blocks], num_loaded_tokens=0)
    engine.scheduler.finish("b")
    assert lookups() == (18, 16, 16)


def test_an_engine_that_takes_less_than_it_was_promised():
    engine = warm()
    lookups = Lookups(engine)
    match(engine, "b", 18)
    engine.scheduler.admit("b", [engine.grant(5)], num_loaded_tokens=8)
    match(engine, "c", 18)
    engine.scheduler.admit("c", [engine.grant(5)], num_loaded_tokens=0)
    assert lookups() == (36, 32, 8)


def test_a_refused_admission_counts_nothing():
    engine = warm()
    lookups = Lookups(engine)
    match(engine, "b", 18)
    with pytest.raises(RequestError, match="expected 0 to the 16 promised"):
        engine.scheduler.admit("b", [engine.grant(5)], num_loaded_tokens=17)
    assert lookups() == (0, 0, 0)


@pytest.mark.parametrize(("end", "counted"), [("finish", (18, 16, 0)), ("preempt", (0, 0, 0))])
def test_a_request_that_is_never_admitted_counts_when_it_ends(end, counted):
    engine = warm()
    lookups = Lookups(engine)
    for _ in range(2):
        match(engine, "b", 18)
    getattr(engine.scheduler, end)("b")
    assert lookups() == counted
    engine.scheduler.finish("b")
    assert lookups() == counted


def test_a_request_that_returns_after_a_preemption_is_another_lookup():
    engine = warm()
    lookups = Lookups(engine)
    engine.add("b", tokens(18))
    engine.settle()
    engine.remove("b", preempt=True)
    assert lookups() == (18, 16, 16)
    engine.add("b", tokens(18))
    assert lookups() == (36, 32, 32)


def test_a_promise_that_a_reset_revoked_counts_as_found():
    engine = warm()
    lookups = Lookups(engine)
    match(engine, "b", 18)
    engine.scheduler.reset()
    engine.scheduler.admit("b", [engine.grant(5)], num_loaded_tokens=16)
    assert lookups() == (18, 16, 0)


def test_a_request_that_waits_for_staging_blocks_counts_what_it_gets_in_the_end():
    engine = warm(32, num_staging_blocks=8)
    engine.add("other", tokens(64, start=1000))
    engine.step({"other": 32})  # its saves hold the staging buffer
    assert engine.scheduler.stats().staging_reserved_blocks == 8
    lookups = Lookups(engine)
    for _ in range(3):
        assert match(engine, "b", 42, can_wait=False) == 0
        engine.step()
    engine.apply(engine.workers[0], engine.workers[0].finish())
    engine.step()
    num_tokens = match(engine, "b", 42, can_wait=False)
    assert num_tokens > 0
    assert lookups() == (0, 0, 0)
    engine.scheduler.admit("b", [engine.grant(11)], num_loaded_tokens=num_tokens)
    assert lookups() == (42, 32, num_tokens)


def test_tokens_without_staging_blocks_count_as_found_and_dropped():
    engine = warm(32, num_staging_blocks=8)
    engine.add("other", tokens(64, start=1000))
    engine.step({"other": 32})
    lookups = Lookups(engine)
    assert match(engine, "b", 42, can_wait=False) == 0
    engine.scheduler.admit("b", [engine.grant(11)], num_loaded_tokens=0)
    engine.scheduler.finish("b")
    assert lookups() == (42, 32, 0)
    assert engine.scheduler.stats().dropped_load_blocks == 8


def test_what_is_found_while_loads_are_suspended():
    engine = warm(breaker_failures=1)
    engine.add("b", tokens(18))
    _, (results,) = engine.step()
    engine.apply(engine.workers[0], results + engine.workers[0].finish(fail=True))
    assert engine.scheduler.stats().num_open_breakers == 1
    lookups = Lookups(engine)
    assert match(engine, "c", 18) == 0
    engine.scheduler.admit("c", [engine.grant(5)], num_loaded_tokens=0)
    assert lookups() == (18, 16, 0)


@pytest.mark.parametrize(
    ("limits", "counted"),
    [
        (RequestLimits(max_load_tokens=10), (8, 8, 8)),
        (RequestLimits(max_load_tokens=30), (28, 16, 16)),
        (RequestLimits(max_load_tokens=100), (34, 16, 16)),
        (RequestLimits(max_load_tokens=3), (0, 0, 0)),
        (RequestLimits(max_load_tokens=0), (0, 0, 0)),
        (RequestLimits(cache=False), (0, 0, 0)),
        (RequestLimits(max_save_tokens=0), (34, 16, 16)),
    ],
    ids=["cut", "cut behind the hit", "far", "under a block", "none", "no cache", "of saves"],
)
def test_what_a_request_may_not_load_is_not_looked_up(limits, counted):
    engine = warm()
    lookups = Lookups(engine)
    engine.add("b", tokens(34), limits=limits)
    assert lookups() == counted


def test_limits_of_the_settings_count_as_those_of_a_request():
    engine = warm(max_load_tokens=2 * BLOCK_SIZE)
    lookups = Lookups(engine)
    engine.add("b", tokens(34))
    assert lookups() == (8, 8, 8)


def test_nothing_is_looked_up_inside_a_block_nor_by_a_tier_that_is_off():
    engine = warm()
    lookups = Lookups(engine)
    match(engine, "b", 18, hbm=5)
    engine.scheduler.finish("b")
    assert lookups() == (0, 0, 0)
    off = FakeEngine(num_cpu_chunks=0)
    match(off, "b", 18)
    off.scheduler.finish("b")
    assert Lookups(off)() == (0, 0, 0)
