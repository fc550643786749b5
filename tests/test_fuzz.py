"""Over 100,000 inputs that no engine, no operator and no other process should send: nothing breaks, nothing changes."""

import dataclasses
import functools
import math
import random
from typing import Any

import pytest

from tests.core.fakes import LAYOUT, FakeEngine, FakeWorker, tokens
from tests.core.swap.fakes import SwapEngine
from tests.inside.scheduler import chunk_states, job_table, request_table, slot_of_chunk, swapped_requests
from tests.worker.engine import Engine as WorkerEngine
from tpu_offload import (
    BlockHasher,
    CopyJob,
    CopyPart,
    HostStore,
    JobKind,
    JobResult,
    JobState,
    OffloadConfig,
    OffloadError,
    RequestError,
    ScheduledRequest,
    StepPlan,
    StepReport,
)
from tpu_offload.types import BlockHash

HUGE = 10**30
JUNK = [
    None, True, False, -1, -HUGE, HUGE, 2**63, 1.5, -0.0, math.nan, math.inf, "", "a", "\ud800", "7", b"", b"\xff" * 16,
    (), [], {}, set(), (None,), (1, "x"), [[1]], ((0,),), ((3, 1),), ((0, 1, 2, 3),), ((-1, 4),), ((0, HUGE),),
    range(3), (math.nan,), ("0", "4"), object(), int, lambda: 0, JobState.SENT, StepPlan, bytearray(b"x"), 1j,
]  # fmt: skip


def broken(cls, **fields):
    """An instance that no constructor has looked at, as unpickling makes it."""
    instance = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


def mutated(rng: random.Random, good, *, keep=()):
    """A copy of a dataclass with one to three fields that are junk."""
    fields = {f.name: getattr(good, f.name) for f in dataclasses.fields(good)}
    names = [name for name in fields if name not in keep]
    for name in rng.sample(names, rng.randint(1, min(3, len(names)))):
        fields[name] = rng.choice(JUNK)
    if rng.random() < 0.1:
        del fields[rng.choice(names)]  # of another version
    return broken(type(good), **fields)


def state(scheduler) -> tuple:
    """Everything of a scheduler that a report or a call may change, but for what counts those that are ignored."""
    stats = scheduler.stats().as_dict()
    del stats["num_ignored_results"], stats["num_rejected_reports"]
    jobs = [
        (job.job_id, job.state, sorted(job.waiting_for), job.all_failed, job.detached, sorted(job.failed_blocks))
        for job in job_table(scheduler)
    ]
    promises = [(r.request_id, r.promise, r.load, len(r.keys)) for r in request_table(scheduler).all()]
    return (
        tuple(stats.values()),
        jobs,
        promises,
        dict(slot_of_chunk(scheduler)),
        set(chunk_states(scheduler).unready),
        dict(chunk_states(scheduler).pins),
    )


def refusal(call) -> str:
    """The line with which the library refuses a call; empty if it does not. Anything else that is raised is a bug."""
    try:
        call()
    except OffloadError as e:
        (line,) = str(e).splitlines()
        return line
    return ""


def busy_engine() -> FakeEngine:
    """Two workers, with saves and a load in flight, a promise, and something saved."""
    engine = FakeEngine(workers=[FakeWorker(0), FakeWorker(1)], num_blocks=64)
    engine.serve("saved", tokens(16))
    engine.add("loading", tokens(16))
    engine.add("saving", tokens(8, start=500))
    engine.step({"saving": 8})
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(12))
    assert engine.scheduler.match("promised", hashes, num_tokens=12, num_computed_tokens=0).num_tokens
    assert engine.scheduler.stats().num_jobs_in_flight == 2
    return engine


@pytest.fixture
def quiet(caplog):
    """A hundred thousand log records would be kept."""
    caplog.set_level("CRITICAL")


@pytest.mark.wide
def test_fifty_thousand_reports_that_make_no_sense_or_name_unknown_jobs_change_nothing(quiet):
    engine = busy_engine()
    scheduler, rng = engine.scheduler, random.Random(1)
    before = state(scheduler)
    good = JobResult(job_id=1000, state=JobState.FINISHED)
    for _ in range(50_000):
        results = []
        for _ in range(rng.randint(0, 3)):  # unknown jobs; a report of these alone is sound
            known = JobResult(
                job_id=rng.choice([77, 1000, 2**40]),
                state=rng.choice([JobState.FINISHED, JobState.FAILED]),
                error="x",
                duration_s=0.1,
            )
            results.append(known if rng.random() < 0.5 else mutated(rng, good, keep=["failed_blocks"]))
        if rng.random() < 0.1:
            results.append(rng.choice(JUNK))
        report = StepReport(worker_id=rng.randint(0, 1), results=tuple(results), num_host_slots=(rng.choice([0, 64]),))
        if rng.random() < 0.7:
            # Junk that could be meant is not junk: a larger incarnation is a worker that was started anew.
            report = mutated(rng, report)
            if type(getattr(report, "incarnation", None)) is int and report.incarnation > 0:
                object.__setattr__(report, "incarnation", 0)
            if type(getattr(report, "num_cache_losses", None)) is int and report.num_cache_losses > 0:
                object.__setattr__(report, "num_cache_losses", 0)
        if rng.random() < 0.02:
            report = rng.choice(JUNK)  # type: ignore[assignment]
        update = scheduler.apply(report)
        assert (update.loaded, update.failed_loads, update.transfers) == ((), (), ())
        assert state(scheduler) == before, report
    stats = scheduler.stats()
    assert stats.num_rejected_reports > 20_000
    assert stats.num_ignored_results > 1_000
    engine.scheduler.release("promised")
    engine.settle()
    scheduler.check_invariants()
    engine.check_bytes(engine.requests["loading"], 16)


def call_with_junk(rng: random.Random, scheduler, hashes) -> None:
    """One call of the engine's with some arguments that make no sense."""

    def maybe(good):
        return rng.choice(JUNK) if rng.random() < 0.5 else good

    name = maybe(rng.choice(["loading", "promised", "saving", "new", "out"]))
    hashes = maybe([*hashes[:2], maybe(hashes[2]), *hashes[3:]])
    blocks = maybe([1, 2, maybe(3), 4])
    swap = scheduler.swap
    rng.choice([
        lambda: scheduler.match(name, hashes, num_tokens=maybe(12), num_computed_tokens=maybe(0)),
        lambda: scheduler.admit(name, [blocks], num_loaded_tokens=maybe(11)),
        lambda: scheduler.release(name),
        lambda: scheduler.plan_step([maybe(broken(
            ScheduledRequest, request_id=name, block_tables=rng.choice([[blocks], blocks]), block_hashes=hashes,
            num_prompt_tokens=maybe(8),
            num_computed_tokens=maybe(8), retained_tokens=maybe([4]),
        ))]),
        lambda: swap.swap_out(name, maybe([blocks]), hashes, num_computed_tokens=maybe(8)),
        lambda: swap.swap_in(name, maybe([blocks]), present=maybe([0])),
        lambda: swap.can_swap_in(name),
        lambda: swap.num_blocks(name),
        lambda: swap.abort_swap_in(name),
    ])()  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_thirty_thousand_calls_that_make_no_sense_raise_one_clear_line_and_change_nothing(seed, quiet):
    engine = SwapEngine(num_host_chunks=12, num_workers=2, blocks_per_chunk=1 + seed % 2)
    scheduler, rng = engine.scheduler, random.Random(seed)
    out = engine.start("out", tokens(9))
    engine.swap_out("out")
    engine.settle()
    num_errors = 0
    for i in range(1500):
        before = state(scheduler)
        error = refusal(functools.partial(call_with_junk, rng, scheduler, out.hashes * 3))
        if error:
            num_errors += 1
            assert state(scheduler) == before, error
        if i % 20 == 0:
            scheduler.check_invariants()
            for name in ("loading", "promised", "saving", "new"):
                scheduler.finish(name)
            swaps = [name for name in swapped_requests(engine.swap) if name != "out"]
            engine.swap.discard(swaps)
    assert num_errors > 500
    scheduler.check_invariants()


def strange_job(rng: random.Random) -> object:
    ids = tuple(rng.choice([0, 1, 2, 5, 900, -1, HUGE, None, "3", 2.0, True]) for _ in range(rng.randint(0, 3)))
    others = tuple(rng.choice([0, 1, 3, 10**6]) for _ in ids)
    kind = rng.choice(list(JobKind))
    part = CopyPart(store=rng.choice(list(HostStore)), block_ids=(1, 2), host_block_ids=(3, 4))
    odd = broken(CopyPart, group_id=0, store=HostStore.HOST_TIER, block_ids=ids, host_block_ids=others)
    good = CopyJob(job_id=rng.randrange(10**6), kind=kind, parts=(part,), request_id="r")
    return rng.choice([
        rng.choice(JUNK),
        mutated(rng, good),
        broken(CopyJob, job_id=rng.randrange(10**6), kind=kind, parts=(odd,), request_id="", num_staging_blocks=0,
               rank=rng.choice([0, rng.choice(JUNK)])),
        broken(CopyJob, job_id=rng.randrange(10**6), kind=kind, request_id="r", num_staging_blocks=0,
               parts=(mutated(rng, part), part)[: rng.randint(1, 2)]),
    ])  # fmt: skip


@pytest.mark.wide
def test_fifteen_thousand_plans_that_make_no_sense_leave_worker_and_caches_as_they_were(quiet):
    engine = WorkerEngine()
    worker, rng = engine.worker, random.Random(3)
    engine.worker.wait_until_allocated()
    caches = engine.caches
    for step_id in range(15_000):
        plan = broken(
            StepPlan,
            step_id=rng.choice([step_id, rng.choice(JUNK)]),
            cancelled_job_ids=rng.choice(JUNK),
            cache_epochs=rng.choice([(), rng.choice(JUNK)]),
            next_job_id=rng.choice([0, rng.choice(JUNK)]),
            division=rng.choice([None, rng.choice(JUNK)]),
            jobs=tuple(strange_job(rng) for _ in range(rng.randint(0, 10))),
        )
        plan = mutated(rng, plan) if rng.random() < 0.1 else plan
        caches = worker.begin_step(plan, caches)
        worker.end_step(plan, caches)
        for result in worker.poll().results:
            # Cancelled is what comes with epochs that cannot be read.
            assert result.error.splitlines() == [result.error] or result.state is not JobState.FAILED
    engine.caches = caches
    engine.expect_what_is_there()  # some jobs made sense
    engine.check_round_trip()


def test_five_thousand_environments_are_a_config_or_one_clear_line(quiet):
    rng = random.Random(4)
    texts = ["", " ", "0", "-1", "1", "1e400", "nan", "inf", "-inf", "auto", "yes", "0x10", "1_000", "9" * 40, "1,2",
             "\x00", "\ud800", "direct", "1.5", "None", "[]", "💥", "a" * 5000, "1;2", "true"]  # fmt: skip
    names = [f"TPU_OFFLOAD_{field.upper()}" for field in OffloadConfig.model_fields]
    num_errors = 0
    for _ in range(5000):
        environ = {rng.choice([*names, "TPU_OFFLOAD_", "TPU_OFFLOAD_NOPE"]): rng.choice(texts) for _ in range(3)}

        def read(environ=environ):
            config = OffloadConfig.from_env(environ)
            config.staging_blocks(LAYOUT)
            config.host_chunks(LAYOUT)

        num_errors += bool(refusal(read))
    assert 1000 < num_errors < 5000


def test_five_thousand_token_lists_are_hashed_or_refused_whole():
    rng = random.Random(5)
    hasher = BlockHasher(LAYOUT.fingerprint(), block_size=4)
    num_errors = 0
    for _ in range(5000):
        ids: list[Any] = [rng.choice([0, 5, 151_000, 2**31, 2**63 - 1]) for _ in range(12)]
        bad = rng.random() < 0.7
        if bad:
            ids[rng.randrange(12)] = rng.choice([-1, 2**63, HUGE, 1.5, math.nan, None, "7", b"7", [1], {}])
        hashes: list[BlockHash] = []
        error = refusal(functools.partial(hasher.extend, hashes, ids, cache_salt=rng.choice(["", "tenant"])))
        num_errors += bool(error)
        assert bool(error) == bad, ids
        assert len(hashes) == (0 if bad else 3)
    assert num_errors > 3000
    with pytest.raises(RequestError, match="expected valid text"):
        hasher.extend([], [1] * 4, cache_salt="\ud800")
