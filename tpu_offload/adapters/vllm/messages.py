"""What the scheduler side and the worker side send each other through vLLM: plans down, reports up."""

import dataclasses
from typing import final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tpu_offload import KVLayout, StepPlan, StepReport


@final
@dataclasses.dataclass(frozen=True)
class KnownTokens:
    """Tokens that a request has generated and whose KV may be saved from this step on, as vLLM knows them.

    Attributes:
      request_id: a request of this step.
      first: how many tokens come before them.
      token_ids: at least one.
    """

    request_id: str
    first: int
    token_ids: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True)
class PlanMessage(KVConnectorMetadata):
    """One step's plan.

    Attributes:
      plan: what the library's worker does.
      idle: nothing is computed in this step, so that there is time to wait a little for a copy.
      spoilt_block_ids: blocks that this step computes on and that do not hold what they should. vLLM has no way to be
        told so but by a worker.
      known_tokens: to be held against those that the runner has.
      distrusted: requests of which the scheduler has heard that nothing is to be saved.
      finished: requests that ended before this step; others may come under the same ids.
      background_job_ids: loads of the plan that no forward pass needs before vLLM has been told that they have ended.
    """

    plan: StepPlan
    idle: bool
    spoilt_block_ids: frozenset[int] = frozenset()
    known_tokens: tuple[KnownTokens, ...] = ()
    distrusted: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()
    background_job_ids: frozenset[int] = frozenset()


@final
@dataclasses.dataclass(frozen=True)
class ReportMessage(KVConnectorWorkerMetadata):
    """What one worker has to say after a step; aggregated, what several have.

    Attributes:
      reports: of one worker or more, in no order.
      layout: what the caches are made of, in the first message of each worker.
      distrusted: requests that may have been computed on other tokens than vLLM has for them, each with the blocks
        from there on.
      forget_all: a load turned out to have failed after steps had computed on its blocks, so that KV which was saved
        since may be wrong.
      computed_on_invalid: a step has computed on blocks that are reported as invalid with this message.
    """

    reports: tuple[StepReport, ...]
    layout: KVLayout | None = None
    distrusted: tuple[tuple[str, tuple[int, ...]], ...] = ()
    forget_all: bool = False
    computed_on_invalid: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMessage":
        """Puts two messages of one step together."""
        assert isinstance(other, ReportMessage), f"a report of {type(other)}"
        return ReportMessage(
            self.reports + other.reports,
            self.layout or other.layout,
            self.distrusted + other.distrusted,
            self.forget_all or other.forget_all,
            self.computed_on_invalid or other.computed_on_invalid,
        )
