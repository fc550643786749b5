"""What crosses processes: plans and reports by pickle, statistics by vLLM's own encoding."""

import pickle

import msgspec
import pytest

from tests.adapters.scheduler_stack import make_stack, save_prompt
from tpu_offload import JobResult, JobState, StepPlan, StepReport
from tpu_offload.adapters.vllm.messages import PlanMessage, ReportMessage
from tpu_offload.types import Direction, TransferJob

pytestmark = pytest.mark.vllm

LOAD = TransferJob(7, Direction.LOAD, 0, (1, 2), (3, 4), "request")
REPORTS = tuple(StepReport(i, (JobResult(7, JobState.FAILED, "why", 0.5),), 9, ((0, 4),)) for i in range(2))


def test_plans_and_reports_survive_pickling():
    for message in (
        PlanMessage(StepPlan(3), idle=True),
        PlanMessage(StepPlan(4, (LOAD,), (TransferJob(8, Direction.SAVE, 0, (5,), (6,)),), (2,)), idle=False),
        ReportMessage(REPORTS),
    ):
        assert pickle.loads(pickle.dumps(message)) == message


def test_reports_add_up_in_any_order_and_keep_the_layout():
    layout = make_stack().offload._layout
    first, second = ReportMessage(REPORTS[:1], layout), ReportMessage(REPORTS[1:])
    assert first.aggregate(second) == ReportMessage(REPORTS, layout)
    assert second.aggregate(first) == ReportMessage(REPORTS[::-1], layout)


def test_statistics_survive_the_way_to_the_frontend():
    stack = make_stack()
    save_prompt(stack, "a")
    stack.side._has_news, stack.side._told = True, type(stack.side._told)()
    payload = stack.side.take_stats().to_dict()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(payload)) == payload
