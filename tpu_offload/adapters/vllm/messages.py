"""Messages between scheduler side and worker side, sent through vLLM: plans down, reports up."""

import dataclasses
from typing import final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tpu_offload import KVLayout, StepPlan, StepReport


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownTokens:
    """Generated tokens of a request as vLLM has them; their KV may be saved from this step on.

    Attributes:
      request_id: a request of this step.
      first: position of the first token.
      token_ids: at least one.
    """

    request_id: str
    first: int
    token_ids: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanMessage:
    """One step's plan, of one scheduler.

    Attributes:
      plan: the plan for the library's worker.
      idle: nothing is computed in this step, so the worker has time to wait a little for a copy.
      invalid_block_ids: invalid blocks that this step computes on. Only a worker can report them to vLLM.
      known_tokens: compared with the tokens that the model runner has.
      tainted: requests that the scheduler side knows to be tainted (see `tainted_requests`).
      finished_req_ids: requests that ended before this step; their ids may be reused.
      background_job_ids: loads of the plan that vLLM waits for: no forward pass needs them before vLLM knows that they
        have ended.
      scheduler_id: identifies the scheduler side that it is from.
      is_timed: the workers report the end of the step (`ReportMessage.timed_step_id`).
    """

    plan: StepPlan
    idle: bool
    invalid_block_ids: frozenset[int] = frozenset()
    known_tokens: tuple[KnownTokens, ...] = ()
    tainted: frozenset[str] = frozenset()
    finished_req_ids: frozenset[str] = frozenset()
    background_job_ids: frozenset[int] = frozenset()
    scheduler_id: str = ""
    is_timed: bool = False


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanMessages(KVConnectorMetadata):
    """The plans of one step: one, or with data-parallel ranks one of each, in their order.

    tpu-inference merges those of ranks: it makes an object without arguments, and extends its list `requests_meta`.

    Attributes:
      requests_meta: the plans.
    """

    requests_meta: list[PlanMessage] = dataclasses.field(default_factory=list)


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportMessage:
    """The report of one worker to one scheduler side after a step or, merged, of several workers.

    Attributes:
      reports: of one or more workers, in no particular order.
      layouts: worker ids with the layouts of their caches, each in the first message of its worker.
      tainted: requests that may have been computed on other tokens than vLLM has, each with its blocks from the first
        tainted one on.
      needs_reset: a load failed after steps had computed on its blocks, so KV that was saved since may be wrong.
      computed_on_invalid: a step has computed on blocks that are reported invalid with this message.
      timed_step_id: the plan of the step that this is the report of, if it `is_timed`.
    """

    reports: tuple[StepReport, ...]
    layouts: tuple[tuple[int, KVLayout], ...] = ()
    tainted: tuple[tuple[str, tuple[int, ...]], ...] = ()
    needs_reset: bool = False
    computed_on_invalid: bool = False
    timed_step_id: int | None = None

    def merged(self, other: "ReportMessage") -> "ReportMessage":
        """One message for two of one step."""
        return ReportMessage(
            reports=self.reports + other.reports,
            layouts=self.layouts + other.layouts,
            tainted=self.tainted + other.tainted,
            needs_reset=self.needs_reset or other.needs_reset,
            computed_on_invalid=self.computed_on_invalid or other.computed_on_invalid,
            timed_step_id=self.timed_step_id if other.timed_step_id is None else other.timed_step_id,
        )


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportMessages(KVConnectorWorkerMetadata):
    """The reports after a step. vLLM gives all of them to every rank, and each scheduler side takes its own.

    Attributes:
      of_schedulers: by `PlanMessage.scheduler_id`; none for a scheduler side with nothing new.
    """

    of_schedulers: dict[str, ReportMessage]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMessages":
        """Merges the reports of two workers in one step."""
        assert isinstance(other, ReportMessages), f"a report of {type(other)}"
        merged = dict(self.of_schedulers)
        for scheduler_id, message in other.of_schedulers.items():
            mine = merged.get(scheduler_id)
            merged[scheduler_id] = message if mine is None else mine.merged(message)
        return ReportMessages(of_schedulers=merged)
