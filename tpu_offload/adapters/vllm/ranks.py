"""Data-parallel ranks: one scheduler side for each, one worker side for all.

tpu-inference's `DPScheduler` runs a scheduler of vLLM with a scheduler side of ours for each rank, in processes of
their own. Their plans arrive together, by rank (`PlanMessages`), and are merged here into one; every report is split by
rank, and goes up with the ids of the scheduler sides that it is for (`ReportMessages`), because the same output goes to
all of them. Block ids stay those of a rank; ids of jobs are the worker's, see `RankPlans`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

from tpu_offload import RankPlans, StepReport
from tpu_offload.adapters.vllm.messages import PlanMessage
from tpu_offload.adapters.vllm.patching import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@final
class RankMessages:
    """Merges the messages of all ranks, and splits reports.

    Args:
      num_ranks: as in `KVLayout.num_ranks`.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._plans = RankPlans(num_ranks)

    def merge(self, messages: Sequence[PlanMessage]) -> PlanMessage:
        """One message with what is in all, whose plan is for the worker.

        Raises:
          ValueError: not one message of each rank.
        """
        plan = self._plans.merge([message.plan for message in messages])
        background = {
            self._plans.job_id(rank, job_id)
            for rank, message in enumerate(messages)
            for job_id in message.background_job_ids
        }
        return PlanMessage(
            plan=plan,
            idle=all(message.idle for message in messages),
            invalid_block_ids=frozenset().union(*(message.invalid_block_ids for message in messages)),
            known_tokens=tuple(known for message in messages for known in message.known_tokens),
            tainted=frozenset().union(*(message.tainted for message in messages)),
            finished_req_ids=frozenset().union(*(message.finished_req_ids for message in messages)),
            background_job_ids=frozenset(background),
        )

    def split(self, reports: Iterable[StepReport]) -> list[tuple[StepReport, ...]]:
        """The reports for each rank."""
        of_ranks = [self._plans.split(report) for report in reports]
        return [tuple(of_rank[rank] for of_rank in of_ranks) for rank in range(self._num_ranks)]


def count_host_tokens_in_routing(manager: "KVCacheManager", num_host_tokens: Callable[[Any, int], int]) -> None:
    """Has `DPScheduler` route a request to the rank whose host tier has its prefix, too.

    It sends a new request to the rank with the least work, less what that rank has in HBM, which it asks the
    coordinator of the rank's KV caches for. Otherwise only `KVCacheManager.get_computed_blocks` asks that.

    Args:
      manager: the rank's.
      num_host_tokens: tokens of a prompt in the host tier, given its block hashes and the most tokens to find.
    """
    find, get_computed_blocks = manager.coordinator.find_longest_cache_hit, manager.get_computed_blocks
    is_scheduling = False

    def get_while_scheduling(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_scheduling
        is_scheduling = True
        try:
            return get_computed_blocks(*args, **kwargs)
        finally:
            is_scheduling = False

    def find_with_host(block_hashes: Any, max_tokens: int, *args: Any, **kwargs: Any) -> Any:
        found = find(block_hashes, max_tokens, *args, **kwargs)
        if is_scheduling:
            return found
        blocks, num_tokens, *others = found
        return blocks, max(num_tokens, num_host_tokens(block_hashes, max_tokens)), *others

    manager.get_computed_blocks = get_while_scheduling
    manager.coordinator.find_longest_cache_hit = find_with_host


def shut_down_with_ranks(shut_down: Callable[["VllmConfig"], None]) -> None:
    """Has `DPScheduler.shutdown` shut the worker side down, which nothing else in its process does.

    Args:
      shut_down: called with the engine's configuration.
    """
    from tpu_inference.core.sched.dp_scheduler import DPScheduler

    def shutdown(original: Callable[[Any], None], scheduler: Any) -> None:
        shut_down(scheduler.vllm_config)
        original(scheduler)

    wrap_once(DPScheduler, "shutdown", shutdown)
