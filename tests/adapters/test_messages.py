"""Messages between processes: plans and reports by pickle, statistics in vLLM's own encoding."""

import dataclasses
import pickle

import msgspec
import pytest

from tests.adapters.scheduler_stack import make_stack, save_prompt
from tests.jobs import copy_job
from tpu_offload import JobResult, JobState, KVLayout, LayerGroup, LayerGroupKind, StepPlan, StepReport
from tpu_offload.adapters.vllm.messages import KnownTokens, PlanMessage, PlanMessages, ReportMessage, ReportMessages
from tpu_offload.adapters.vllm.ranks import RankMessages
from tpu_offload.types import JobKind

pytestmark = pytest.mark.vllm

LOAD = copy_job(7, JobKind.LOAD, (1, 2), (3, 4), request_id="request")
REPORTS = tuple(
    StepReport(
        worker_id=i,
        results=(JobResult(job_id=7, state=JobState.FAILED, error="why", duration_s=0.5),),
        num_host_slots=(9,),
        lost_slots=((0, 0, 4),),
    )
    for i in range(2)
)


def test_plans_and_reports_survive_pickling():
    for message in (
        PlanMessages(requests_meta=[PlanMessage(plan=StepPlan(step_id=3), idle=True)]),
        PlanMessages(
            requests_meta=[
                PlanMessage(
                    plan=StepPlan(
                        step_id=4,
                        jobs=(LOAD, copy_job(8, JobKind.SAVE, (5,), (6,))),
                        cancelled_job_ids=(2,),
                    ),
                    idle=False,
                    scheduler_id="one",
                )
            ]
        ),
        ReportMessages(of_schedulers={"one": ReportMessage(reports=REPORTS)}),
    ):
        assert pickle.loads(pickle.dumps(message)) == message


def test_reports_add_up_in_any_order_and_keep_the_layouts():
    layout = KVLayout(
        block_size=8, groups=(LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, (0, 1), (8, 2, 8), "int8"),)
    )
    first = ReportMessages(of_schedulers={"a": ReportMessage(reports=REPORTS[:1], layouts=((0, layout),))})
    second = ReportMessages(
        of_schedulers={
            "a": ReportMessage(reports=REPORTS[1:], layouts=((1, layout),)),
            "b": ReportMessage(reports=REPORTS),
        }
    )
    assert first.aggregate(second).of_schedulers == {
        "a": ReportMessage(reports=REPORTS, layouts=((0, layout), (1, layout))),
        "b": ReportMessage(reports=REPORTS),
    }
    assert second.aggregate(first).of_schedulers["a"] == ReportMessage(
        reports=REPORTS[::-1], layouts=((1, layout), (0, layout))
    )


def test_the_messages_of_ranks_are_merged_and_reports_split():
    plan = StepPlan(step_id=1, jobs=(LOAD,), next_job_id=8)
    known = KnownTokens(request_id="request", first=3, token_ids=(5,))
    messages = [
        PlanMessage(plan=StepPlan(step_id=1), idle=True, tainted=frozenset({"bad"})),
        PlanMessage(plan=plan, idle=False, known_tokens=(known,), background_job_ids=frozenset({7})),
    ]
    ranks = RankMessages(2)
    merged = ranks.merge(messages)
    (job,) = merged.plan.jobs
    assert (job.rank, set(merged.background_job_ids)) == (1, {job.job_id})
    assert (merged.idle, merged.known_tokens, set(merged.tainted)) == (False, (known,), {"bad"})
    report = dataclasses.replace(REPORTS[0], results=(dataclasses.replace(REPORTS[0].results[0], job_id=job.job_id),))
    first, second = ranks.split([report])
    assert (first[0].results, second[0].results) == ((), REPORTS[0].results)
    assert ranks.split([]) == [(), ()]


def test_statistics_survive_serialization_to_the_frontend():
    stack = make_stack()
    take, payloads = stack.side.take_stats, []

    def take_stats():
        stats = take()
        payloads.extend([stats.to_dict()] if stats is not None else [])
        return stats

    stack.side.take_stats = take_stats
    save_prompt(stack, "a")
    assert payloads
    assert [msgspec.msgpack.decode(msgspec.msgpack.encode(payload)) for payload in payloads] == payloads
