"""A step whose forward pass was not executed: nothing of what it was to compute is saved, and all else is."""

import dataclasses

import pytest

from tests.core.fakes import FakeEngine, FakeRequest, tokens
from tests.core.swap.fakes import SwapEngine
from tests.core.test_states import state_engine, state_parts
from tpu_offload import JobResult, JobState, MatchState, OffloadScheduler, RequestError, StepPlan
from tpu_offload.types import BlockHash, JobKind


class AbortingEngine(FakeEngine):
    """Whose forward pass may fail with whole caches."""

    def fail_step(self, computed: dict[str, int], *, tells_worker: bool = True) -> StepPlan:
        """A step that does not compute these tokens."""
        before = {name: self.requests[name].num_computed for name in computed}
        for name, num_tokens in computed.items():
            self.requests[name].num_computed += num_tokens
        plan = self.scheduler.plan_step([self.held(self.requests[name]) for name in computed])
        for name in computed:
            self.requests[name].num_computed = before[name]
            self.requests[name].num_named_blocks = 0
        self.scheduler.abort_step(plan)
        for worker in self.workers:
            results = worker.begin_step(plan)
            if tells_worker:
                results += [JobResult(job_id=job.job_id, state=JobState.CANCELLED) for job in plan.of(JobKind.SAVE)]
            else:
                worker.end_step(plan)
            self.apply(worker, results)
        return plan

    def run_dry(self) -> None:
        """Steps until nothing is in flight or waits for room."""
        for _ in range(12):
            self.step()
            for worker in self.workers:
                self.apply(worker, worker.finish())
        assert not self.scheduler.has_jobs
        self.scheduler.check_invariants()

    def request(self, name: str, num_tokens: int = 16) -> FakeRequest:
        request = self.add(name, tokens(num_tokens))
        assert request is not None
        return request

    def num_loaded(self, name: str, num_tokens: int = 17) -> int:
        """How many tokens of the prompt a request loads; their bytes are checked."""
        request = self.request(name, num_tokens)
        num_loaded = request.num_computed
        self.run_dry()
        self.remove(name)
        return num_loaded


@pytest.mark.parametrize("tells_worker", [True, False], ids=["cancelled", "saved nevertheless"])
def test_what_it_was_to_compute_is_not_saved_until_it_is_computed(tells_worker: bool) -> None:
    engine = AbortingEngine()
    engine.request("a")
    plan = engine.fail_step({"a": 16}, tells_worker=tells_worker)
    assert plan.of(JobKind.SAVE), "it would have been saved"
    engine.run_dry()
    assert engine.num_loaded("b") == 0
    assert engine.scheduler.stats().num_failed_jobs == 0
    engine.step({"a": 16})
    engine.run_dry()
    assert engine.num_loaded("c") == 16


def test_what_had_no_room_in_it_is_not_saved_either() -> None:
    engine = AbortingEngine(num_staging_blocks=2)
    engine.request("a")
    plan = engine.fail_step({"a": 16})
    assert sum(job.num_blocks for job in plan.of(JobKind.SAVE)) == 2
    engine.run_dry()
    engine.scheduler.preempt("a")
    assert engine.scheduler.stats().dropped_save_blocks == 0, "there was no KV to save"
    assert engine.num_loaded("b") == 0
    engine.step({"a": 8})
    engine.run_dry()
    assert engine.num_loaded("c") == 8
    engine.step({"a": 8})
    engine.run_dry()
    assert engine.num_loaded("d") == 16


def test_what_others_offer_is_saved() -> None:
    """A request whose blocks are computed, and still wait for room, shares the job of one whose are not."""
    engine = AbortingEngine(num_staging_blocks=4)
    done = engine.add("done", tokens(24, start=500))
    assert done is not None
    engine.step({"done": 24})
    assert engine.workers[0].in_flight[0][0].num_blocks == 4
    engine.apply(engine.workers[0], engine.workers[0].finish())
    engine.request("a")
    (save,) = engine.fail_step({"a": 8}).of(JobKind.SAVE)
    assert set(done.block_ids[4:]) | set(engine.requests["a"].block_ids[:2]) == set(save.block_ids)
    engine.run_dry()
    assert engine.num_loaded("b") == 0
    again = engine.add("again", tokens(25, start=500))
    assert again is not None
    assert again.num_computed == 24


def test_a_request_that_waits_for_such_a_save_waits_no_more() -> None:
    engine = AbortingEngine()
    engine.request("a")
    plan = engine.scheduler.plan_step([dataclasses.replace(engine.held(engine.requests["a"]), num_computed_tokens=16)])
    hashes = engine.requests["a"].hashes
    match = engine.scheduler.match
    assert match("b", hashes, num_tokens=17, num_computed_tokens=0).state is MatchState.ARRIVING
    engine.scheduler.abort_step(plan)
    (save,) = plan.of(JobKind.SAVE)
    engine.apply(engine.workers[0], [JobResult(job_id=save.job_id, state=JobState.CANCELLED)])
    assert match("b", hashes, num_tokens=17, num_computed_tokens=0).state is MatchState.MISS


def plan_ahead(engine: AbortingEngine, computed: dict[str, int]) -> StepPlan:
    """Plans a step that computes these tokens; it is not executed yet."""
    for name, num_tokens in computed.items():
        engine.requests[name].num_computed += num_tokens
    return engine.scheduler.plan_step([engine.held(engine.requests[name]) for name in computed])


@pytest.mark.parametrize(("save_on", "kind"), [("compute", JobKind.SAVE), ("preemption", JobKind.EARLY_SAVE)])
def test_steps_that_were_planned_after_it_are_aborted_with_it(save_on: str, kind: JobKind) -> None:
    """Their early saves, too: those read what the first one was to compute."""
    engine = AbortingEngine(save_on=save_on)
    engine.request("a")
    other = engine.add("other", tokens(16, start=500))
    assert other is not None
    plans = [plan_ahead(engine, {"a": 8}), plan_ahead(engine, {"other": 16})]
    if kind is JobKind.EARLY_SAVE:
        engine.remove("other", preempt=True)
        plans.append(engine.scheduler.plan_step())
    engine.remove("a", preempt=True)  # for a plan that is not made
    assert plans[-1].of(kind)
    engine.scheduler.abort_step(plans[0])
    other.num_computed = 0
    for plan in plans:
        for job in plan.jobs:  # the worker saves what is there
            engine.apply(engine.workers[0], [JobResult(job_id=job.job_id, state=JobState.FINISHED)])
    assert not engine.scheduler.plan_step().jobs
    assert engine.num_loaded("b") == 0
    again = engine.add("again", tokens(17, start=500))
    assert again is not None
    assert not again.loading


def test_early_saves_of_its_own_plan_are_published() -> None:
    """They were dispatched before the pass, and read what earlier steps have computed."""
    engine = AbortingEngine(save_on="preemption")
    engine.request("a")
    engine.step({"a": 16})
    engine.remove("a", preempt=True)
    plan = engine.fail_step({})
    assert plan.of(JobKind.EARLY_SAVE)
    engine.run_dry()
    assert engine.num_loaded("b") == 16


def test_its_checkpoint_is_saved_when_it_is_computed() -> None:
    engine = state_engine()
    request = engine.add("a", tokens(42))
    assert request is not None
    engine.step({"a": 38})
    held = engine.held(request)
    states = [*held.block_tables[-1]]
    states[9] = engine.rows.grant()
    tables = [*held.block_tables[:-1], states]
    plan = engine.scheduler.plan_step([dataclasses.replace(held, block_tables=tables, num_computed_tokens=40)])
    assert any(part.group_id == engine.state_group for job in plan.of(JobKind.SAVE) for part in job.parts)
    engine.scheduler.abort_step(plan)
    cancelled = [JobResult(job_id=job.job_id, state=JobState.CANCELLED) for job in plan.of(JobKind.SAVE)]
    engine.apply(engine.workers[0], [*engine.workers[0].finish(), *cancelled])
    assert not state_parts(engine, JobKind.SAVE)
    for _ in range(3):
        engine.step({"a": 1})
    assert state_parts(engine, JobKind.SAVE)
    engine.settle()
    engine.remove("a")
    assert engine.serve("b", tokens(42)) == 40


def test_the_checkpoints_of_several_plans_are_saved_when_they_are_computed() -> None:
    engine = state_engine()
    request = engine.add("a", tokens(50), stops=[40, 44])
    assert request is not None
    engine.step({"a": 38})
    engine.apply(engine.workers[0], engine.workers[0].finish())
    held, plans = engine.held(request), []
    states = [*held.block_tables[-1]]
    for end in (40, 44):
        states[end // 4 - 1] = engine.rows.grant()
        tables = [*held.block_tables[:-1], [*states]]
        plans.append(
            engine.scheduler.plan_step([dataclasses.replace(held, block_tables=tables, num_computed_tokens=end)])
        )
        assert any(part.group_id == engine.state_group for job in plans[-1].of(JobKind.SAVE) for part in job.parts)
    engine.scheduler.abort_step(plans[0])
    saves = [job for plan in plans for job in plan.of(JobKind.SAVE)]
    engine.apply(engine.workers[0], [JobResult(job_id=job.job_id, state=JobState.CANCELLED) for job in saves])
    for _ in range(12):
        engine.step({"a": 1})
    engine.settle()
    engine.remove("a")
    assert engine.serve("b", tokens(42)) == 40
    assert engine.serve("c", tokens(46)) == 44


@pytest.mark.parametrize("is_sent", [False, True], ids=["planned", "sent"])
def test_a_request_that_was_swapped_out_since_is_lost(is_sent: bool) -> None:
    engine = SwapEngine(swap_mode="swap")
    scheduler = engine.scheduler
    plan = scheduler.plan_step()
    assert scheduler.swap.swap_out("a", [[1, 2]], num_computed_tokens=8)
    scheduler.preempt("a")
    later = scheduler.plan_step() if is_sent else None
    scheduler.abort_step(plan)
    (job,) = (later or scheduler.plan_step()).of(JobKind.SWAP_OUT)
    update = scheduler.apply(engine.workers[0].report([JobResult(job_id=job.job_id, state=JobState.FINISHED)]))
    assert update.lost_swaps == ("a",)
    assert not scheduler.swap.can_swap_in("a")
    scheduler.check_invariants()
    assert (scheduler.stats().swap_held_blocks, scheduler.stats().num_failed_jobs) == (0, 0)


def test_a_request_that_was_swapped_out_since_cannot_be_swapped_in() -> None:
    """Also before its copy has ended."""
    engine = SwapEngine(swap_mode="swap")
    plan = engine.scheduler.plan_step()
    assert engine.scheduler.swap.swap_out("a", [[1, 2]], num_computed_tokens=8)
    engine.scheduler.preempt("a")
    engine.scheduler.plan_step()
    assert engine.scheduler.swap.can_swap_in("a")
    engine.scheduler.abort_step(plan)
    assert not engine.scheduler.swap.can_swap_in("a")


def test_a_request_that_needed_no_copy_is_lost_too() -> None:
    """The host tier has all of its blocks; the token that the step was to sample is missing."""
    engine = SwapEngine(swap_mode="swap", num_host_chunks=8)
    scheduler, worker = engine.scheduler, engine.workers[0]
    engine.step([engine.scheduled(engine.start("a", tokens(8), num_computed=8))])
    engine.report(worker)
    engine.settle()
    plan = scheduler.plan_step()
    assert engine.swap_out("a")
    assert not scheduler.plan_step().of(JobKind.SWAP_OUT)
    scheduler.abort_step(plan)
    assert not scheduler.swap.can_swap_in("a")
    assert scheduler.apply(worker.report([])).lost_swaps == ("a",)
    scheduler.check_invariants()


def test_a_request_that_is_swapped_out_afterwards_shares_nothing_of_it() -> None:
    """It has computed its KV; in the pool blocks of one that was to compute the same there may be none."""
    engine = SwapEngine(swap_mode="swap")
    scheduler, worker = engine.scheduler, engine.workers[0]
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(8))
    plan = scheduler.plan_step()
    assert scheduler.swap.swap_out("a", [[1, 2]], hashes, num_computed_tokens=8)
    scheduler.preempt("a")
    scheduler.abort_step(plan)
    assert scheduler.swap.swap_out("b", [[3, 4]], hashes, num_computed_tokens=8)
    scheduler.preempt("b")
    outs = scheduler.plan_step().of(JobKind.SWAP_OUT)
    assert [job.block_ids for job in outs] == [(1, 2), (3, 4)]
    results = [JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in outs]
    assert scheduler.apply(worker.report(results)).lost_swaps == ("a",)
    assert scheduler.swap.can_swap_in("b")
    scheduler.check_invariants()


def test_a_request_that_was_swapped_out_before_is_not() -> None:
    engine = SwapEngine(swap_mode="swap")
    scheduler = engine.scheduler
    assert scheduler.swap.swap_out("a", [[1, 2]], num_computed_tokens=8)
    scheduler.preempt("a")
    plan = scheduler.plan_step()
    scheduler.abort_step(plan)
    (job,) = plan.of(JobKind.SWAP_OUT)
    scheduler.apply(engine.workers[0].report([JobResult(job_id=job.job_id, state=JobState.FINISHED)]))
    assert scheduler.swap.can_swap_in("a")


def test_twice_is_as_once_and_with_offloading_off_it_does_nothing() -> None:
    engine = AbortingEngine()
    engine.request("a")
    plan = engine.fail_step({"a": 16})
    engine.scheduler.abort_step(plan)
    engine.run_dry()
    off = AbortingEngine(num_cpu_chunks=0)
    off.request("a")
    assert not off.fail_step({"a": 16}).jobs


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "a step is aborted by None; expected the StepPlan that plan_step returned"),
        (0, "a step is aborted by 0; expected the StepPlan"),
        (StepPlan(step_id=1), "plan 1 is aborted, whose jobs are below 0; expected one of this scheduler's 1 plans"),
        (StepPlan(step_id=0, next_job_id=9), "whose jobs are below 9; expected one of this scheduler's 1 plans, with"),
        (StepPlan(step_id=True), "plan True is aborted"),
        (StepPlan(step_id=0, jobs=(1,)), "plan 0 is aborted"),  # type: ignore[arg-type]
    ],
)
def test_a_plan_of_another_scheduler(given: StepPlan, says: str) -> None:
    scheduler: OffloadScheduler = FakeEngine().scheduler
    scheduler.plan_step()
    with pytest.raises(RequestError, match=says):
        scheduler.abort_step(given)
