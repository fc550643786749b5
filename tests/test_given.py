"""Whatever an engine hands in: it is read as it is at that moment, or refused with one line and nothing has changed."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.fakes import BLOCK_SIZE, FakeEngine, tokens
from tests.core.swap.fakes import SwapEngine
from tests.given import (
    HASH_FORMS,
    NUMBER_FORMS,
    TABLE_FORMS,
    EngineError,
    Unprintable,
    bad_hashes,
    bad_number,
    bad_table,
    broken_iterator,
)
from tests.inside.scheduler import chunk_index, job_table, request_table
from tests.snapshot import differences, snapshot
from tpu_offload import (
    CachedPrefix,
    Candidate,
    JobResult,
    JobState,
    OffloadError,
    RequestError,
    RequestLimits,
    ScheduledRequest,
    choose_victims,
)
from tpu_offload.types import BlockHash, JobKind

NAMES = ["a", "b", "c", "d"]
NUM_BLOCKS = 6


class Caller:
    """Calls everything that engines call, with arguments of all forms, some of them no good."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.engine = SwapEngine(
            num_host_chunks=24,
            pool=(24,),
            num_workers=1 + seed % 2,
            blocks_per_chunk=1 + seed // 2 % 2,
            num_staging_blocks=8,
            decode_save=True,
            save_on="compute,eviction,preemption",
            save_after_sightings=1 + seed // 4 % 2,
            max_load_tokens=0 if seed % 3 else 16,
        )
        self.scheduler, self.swap = self.engine.scheduler, self.engine.swap
        self.hashes: dict[str, list[BlockHash]] = {}
        for i, name in enumerate(NAMES):
            hashes: list[BlockHash] = []
            self.engine.hasher.extend(hashes, tokens(NUM_BLOCKS * BLOCK_SIZE, start=i // 2 * 100))
            self.hashes[name] = hashes
        self.share_bad = rng.choice([0.1, 0.3])

    def one_of(self, forms: dict[str, Callable[[Any], Any]], good: Any, bad: Callable[[], Any]) -> Any:
        if self.rng.random() < self.share_bad:
            return bad()
        return self.rng.choice(list(forms.values()))(good)

    def table(self) -> Any:
        rng = self.rng
        ids = rng.sample(range(40), rng.choice([NUM_BLOCKS, NUM_BLOCKS, rng.randint(0, NUM_BLOCKS)]))
        return self.one_of(TABLE_FORMS, ids, lambda: bad_table(rng, ids))

    def tables(self) -> Any:
        rng = self.rng
        forms: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}
        return self.one_of(
            forms,
            [self.table()],
            lambda: rng.choice([[], None, 5, "x", iter([[1]]), [None], [[1]] * 2, Unprintable()]),
        )

    def block_hashes(self, name: str, num: int = NUM_BLOCKS) -> Any:
        hashes = self.hashes[name][:num]
        return self.one_of(HASH_FORMS, hashes, lambda: bad_hashes(self.rng, hashes))

    def number(self, good: int) -> Any:
        return self.one_of(NUMBER_FORMS, good, lambda: bad_number(self.rng))

    def name(self, good: str) -> Any:
        return self.one_of({"str": str}, good, lambda: self.rng.choice([None, 5, b"a", ("a",), ["a"], Unprintable()]))

    def limits(self) -> Any:
        rng = self.rng
        good = RequestLimits(
            max_save_tokens=rng.choice([None, 0, 8]),
            max_load_tokens=rng.choice([None, 0, 8]),
            priority=rng.randint(-1, 1),
        )
        return rng.choice([5, "x", Unprintable()]) if rng.random() < self.share_bad / 2 else rng.choice([None, good])

    def scheduled(self, name: str, *, computed: int | None = None) -> Any:
        rng = self.rng
        if rng.random() < self.share_bad / 4:
            return rng.choice([None, 5, "a", Unprintable(), {}])
        num = rng.randint(0, NUM_BLOCKS * BLOCK_SIZE) if computed is None else computed
        return ScheduledRequest(
            request_id=self.name(name),
            block_tables=[self.table()],
            block_hashes=self.block_hashes(name),
            num_prompt_tokens=self.number(num),
            num_computed_tokens=self.number(num),
        )

    def changed(self) -> Any:
        rng = self.rng
        named = [self.scheduled(name) for name in rng.choices(NAMES, k=rng.randint(0, 4))]
        if rng.random() < self.share_bad / 4:
            return rng.choice([None, 5, "abc", broken_iterator(named), Unprintable()])
        forms: list[Callable[[Any], Any]] = [list, tuple, iter]
        return rng.choice(forms)(named)

    def prefix(self, name: str) -> Any:
        rng = self.rng

        def block_of(block_hash: BlockHash) -> Any:
            if rng.random() < self.share_bad / 4:
                raise EngineError("no such block")
            if rng.random() < self.share_bad / 2:
                return rng.choice([None, True, -1, "1", 1.5, [1]])
            return rng.choice(list(NUMBER_FORMS.values()))(self.hashes[name].index(block_hash))

        num = rng.randint(1, NUM_BLOCKS)
        good = CachedPrefix(
            block_hashes=self.block_hashes(name),
            num_blocks=self.number(num),
            block_of=lambda group_id, block_hash: block_of(block_hash),
            num_prompt_tokens=self.number(num * BLOCK_SIZE),
            limits=RequestLimits(max_save_tokens=8),
        )
        changes: list[dict[str, Any]] = [{"block_of": 5}, {"limits": None}, {"limits": 5}]
        bad = dataclasses.replace(good, **rng.choice(changes))
        return self.one_of({"it": lambda it: it}, good, lambda: rng.choice([None, 5, bad]))

    def call(self) -> Callable[[], Any]:
        """Some call, with its arguments."""
        rng, scheduler, swap = self.rng, self.scheduler, self.swap
        good = rng.choice(NAMES)
        name, num = self.name(good), rng.randint(0, NUM_BLOCKS) * BLOCK_SIZE
        held = None if rng.random() < 0.3 else self.scheduled(good)
        calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
            (scheduler.match, (name, self.block_hashes(good)), {
                "num_tokens": self.number(25), "num_computed_tokens": self.number(num), "limits": self.limits()}),
            (scheduler.admit, (name, self.table()), {"num_loaded_tokens": self.number(self.promised(good))}),
            (scheduler.release, (name,), {}),
            (scheduler.plan_step, (self.changed(),), {}),
            (scheduler.plan_step, (self.changed(),), {}),
            (scheduler.preempt, (name,), {"held": held}),
            (scheduler.evict, (self.prefix(good),), {}),
            (scheduler.finish, (name,), {}),
            (swap.swap_out, (name, self.tables(), self.block_hashes(good)), {"num_computed_tokens": self.number(num)}),
            (swap.swap_in, (name, self.tables()), {
                "present": rng.choice([(), {0}, TABLE_FORMS["int64 row"]([0]), self.table()])}),
            (swap.can_swap_in, (name,), {}),
            (swap.num_blocks, (name,), {}),
            (swap.abort_swap_in, (name,), {}),
            (swap.discard, ([good, name] if rng.random() < 0.8 else name,), {}),
            (swap.observe_prefill, (self.number(7), self.number(1)), {}),
        ]  # fmt: skip
        function, args, named = rng.choice(calls)
        return functools.partial(function, *args, **named)

    def promised(self, name: str) -> int:
        request = request_table(self.scheduler).get(name)
        return request.promise.num_tokens if request and request.promise and self.rng.random() < 0.8 else 0

    def report(self) -> None:
        """The workers have done all that they were sent, but for a copy here and there."""
        results = []
        for job in job_table(self.scheduler):
            state = JobState.FAILED if self.rng.random() < 0.1 else JobState.FINISHED
            results.append(JobResult(job_id=job.job_id, state=state, error="x" if state is JobState.FAILED else ""))
        for worker in self.engine.workers:
            self.scheduler.apply(worker.report(results))

    def check_jobs(self) -> None:
        """Jobs hold integers of Python, from 0 on, and as many blocks as places."""
        for job in job_table(self.scheduler):
            for part in job.wire.parts:
                for ids in (part.block_ids, part.host_block_ids):
                    assert type(ids) is tuple
                    assert all(type(i) is int and i >= 0 for i in ids), part
                assert len(part.block_ids) == len(part.host_block_ids) > 0


def refusal(call: Callable[[], Any]) -> str:
    """With what a call is refused, empty if it is not. An error of the engine's own objects may pass through."""
    try:
        call()
    except OffloadError as e:
        return str(e)
    except EngineError:
        return "the engine's own error"
    return ""


@pytest.mark.parametrize("seed", range(8))
def test_a_call_that_is_refused_has_changed_nothing(seed, caplog):
    caplog.set_level("CRITICAL")
    caller = Caller(seed)
    scheduler = caller.scheduler
    num_deferred = num_done = 0
    before = None  # a snapshot, while it holds
    for i in range(400):
        before = before or snapshot(scheduler)
        call = caller.call()
        line = refusal(call)
        num_deferred, num_done = num_deferred + bool(line), num_done + (not line)
        if line:
            assert len(line.splitlines()) == 1, line
            assert not differences(before, snapshot(scheduler)), f"{call} was refused: {line}"
        else:
            before = None
        scheduler.check_invariants()
        caller.check_jobs()
        if i % 7 == 0:
            before = None
            caller.report()
            scheduler.check_invariants()
    assert num_deferred > 50 < num_done
    caller.swap.discard(NAMES)
    for name in NAMES:
        scheduler.finish(name)
    for _ in range(3):
        scheduler.plan_step()
        caller.share_bad = 0.0
        caller.report()
    scheduler.check_invariants()
    assert scheduler.stats().staging_reserved_blocks == 0, "staging blocks that nobody gives back"
    assert scheduler.stats().num_jobs_in_flight == 0
    assert chunk_index(scheduler).num_free_slots + scheduler.stats().num_resident_chunks == 24


@pytest.mark.parametrize("form", TABLE_FORMS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_tables_of_all_forms_are_saved_and_loaded(form, blocks_per_chunk):
    as_form = TABLE_FORMS[form]
    engine = FakeEngine(blocks_per_chunk=blocks_per_chunk, num_staging_blocks=4)
    worker = engine.workers[0]
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(24))
    ids = [9, 3, 11, 5, 2, 8]
    worker.hbm.update(zip(ids, hashes, strict=True))
    plan = engine.scheduler.plan_step(
        [
            ScheduledRequest(
                request_id="a",
                block_tables=[as_form(ids)],
                block_hashes=hashes,
                num_prompt_tokens=24,
                num_computed_tokens=24,
            )
        ]
    )
    for _ in range(3):  # four staging blocks for six: the rest waits for a step that says nothing
        assert {type(i) for job in plan.of(JobKind.SAVE) for i in job.block_ids} <= {int}
        worker.end_step(plan)
        engine.scheduler.apply(worker.report(worker.finish()))
        plan = engine.scheduler.plan_step()
    engine.scheduler.finish("a")
    targets = [20, 25, 21, 24, 22, 23]
    for first in (0, 4):
        found = engine.scheduler.match("b", hashes, num_tokens=25, num_computed_tokens=first * BLOCK_SIZE).num_tokens
        engine.scheduler.admit("b", [as_form(targets)], num_loaded_tokens=found)
        plan = engine.scheduler.plan_step()
        assert {type(i) for job in plan.of(JobKind.LOAD) for i in job.block_ids} == {int}
        worker.begin_step(plan)
        engine.scheduler.apply(worker.report(worker.finish()))
    assert [worker.hbm[i] for i in targets] == hashes
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("form", HASH_FORMS)
def test_hashes_of_all_forms_name_the_same_chunks(form):
    engine = FakeEngine(blocks_per_chunk=2)
    engine.serve("a", tokens(16))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(16))
    given = HASH_FORMS[form](hashes)
    assert engine.scheduler.match("b", given, num_tokens=17, num_computed_tokens=0).num_tokens == 16
    engine.scheduler.release("b")
    assert engine.scheduler.match("b", given, num_tokens=17, num_computed_tokens=0).num_tokens == 16
    plan = engine.scheduler.plan_step(
        [
            ScheduledRequest(
                request_id="c",
                block_tables=[[1, 2, 3, 4]],
                block_hashes=given,
                num_prompt_tokens=16,
                num_computed_tokens=16,
            )
        ]
    )
    assert plan.empty, "they are there already"


def test_a_step_is_refused_as_a_whole():
    engine = FakeEngine()
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(8))
    good = [
        ScheduledRequest(
            request_id=name, block_tables=[[i, i + 1]], block_hashes=hashes, num_prompt_tokens=8, num_computed_tokens=8
        )
        for i, name in enumerate("ab")
    ]
    bad = ScheduledRequest(
        request_id="c", block_tables=[[1, True]], block_hashes=hashes, num_prompt_tokens=8, num_computed_tokens=8
    )
    before = snapshot(engine.scheduler)
    engine.clock.now_s += 1000  # jobs that time out then are not refused, but they wait for a step that is
    with pytest.raises(RequestError, match="request c has the block id True; expected a sequence of integers from 0"):
        engine.scheduler.plan_step([*good, bad])
    with pytest.raises(EngineError):
        engine.scheduler.plan_step(broken_iterator([*good, *good]))
    assert not differences(before, snapshot(engine.scheduler))
    plan = engine.scheduler.plan_step(good)
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [2]  # the prompt is the same


def test_of_a_request_that_is_named_twice_in_a_step_the_last_counts():
    engine = FakeEngine()
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(8))
    named = [
        ScheduledRequest(
            request_id="a", block_tables=[[1, 2]], block_hashes=hashes, num_prompt_tokens=8, num_computed_tokens=8
        ),
        ScheduledRequest(
            request_id="a", block_tables=[[3, 4]], block_hashes=hashes, num_prompt_tokens=8, num_computed_tokens=8
        ),
    ]
    assert [job.block_ids for job in engine.scheduler.plan_step(named).of(JobKind.SAVE)] == [(3, 4)]
    engine.scheduler.check_invariants()
    named = [
        ScheduledRequest(
            request_id="b", block_tables=[[1, 2]], block_hashes=hashes[::-1], num_prompt_tokens=8, num_computed_tokens=8
        ),
        ScheduledRequest(
            request_id="b", block_tables=[[]], block_hashes=hashes[::-1], num_prompt_tokens=8, num_computed_tokens=8
        ),
    ]
    assert engine.scheduler.plan_step(named).empty


def test_another_prompt_under_the_same_id_is_refused_where_it_would_be_saved():
    engine = FakeEngine(num_staging_blocks=1)
    one: list[BlockHash] = []
    other: list[BlockHash] = []
    engine.hasher.extend(one, tokens(8))
    engine.hasher.extend(other, tokens(8, start=100))
    engine.scheduler.plan_step(
        [
            ScheduledRequest(
                request_id="a", block_tables=[[1, 2]], block_hashes=one, num_prompt_tokens=8, num_computed_tokens=8
            )
        ]
    )
    before = snapshot(engine.scheduler)
    with pytest.raises(RequestError, match="the hash of block 1 differs from that of an earlier call"):
        engine.scheduler.plan_step(
            [
                ScheduledRequest(
                    request_id="a",
                    block_tables=[[3, 4]],
                    block_hashes=other,
                    num_prompt_tokens=8,
                    num_computed_tokens=8,
                )
            ]
        )
    with pytest.raises(RequestError, match="request a is preempted with the blocks of request b"):
        engine.scheduler.preempt(
            "a",
            held=ScheduledRequest(
                request_id="b", block_tables=[[3, 4]], block_hashes=other, num_prompt_tokens=8, num_computed_tokens=8
            ),
        )
    assert not differences(before, snapshot(engine.scheduler))


def test_a_refused_match_leaves_the_limits_as_they_were():
    engine = FakeEngine()
    engine.add("a", tokens(8), limits=RequestLimits(max_save_tokens=4))
    before = snapshot(engine.scheduler)
    wrong: list[Any] = [5, 5, 5]
    with pytest.raises(RequestError, match="expected bytes"):
        engine.scheduler.match("a", wrong, num_tokens=12, num_computed_tokens=0, limits=RequestLimits())
    assert not differences(before, snapshot(engine.scheduler))


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_victims_are_chosen_from_tables_of_all_forms(form):
    candidates = [
        Candidate(request_id="old", block_tables=[TABLE_FORMS[form]([1, 2])], num_new_blocks=TABLE_FORMS[form]([1])),
        Candidate(request_id="new", block_tables=[TABLE_FORMS[form]([2, 3])], num_new_blocks=[0]),
    ]
    assert choose_victims(candidates, num_free=TABLE_FORMS[form]([0])) == ("new",)
    with pytest.raises(RequestError, match="expected"):
        choose_victims(
            [*candidates, Candidate(request_id="bad", block_tables=[[True]], num_new_blocks=[0])], num_free=[0]
        )
