"""Data-parallel ranks of one engine: what `DPScheduler` lacks with a connector.

vLLM's executors join the outputs of the connectors of several workers if the engine's scheduler has a connector. With
ranks, tpu-inference 0.32 runs the schedulers that have one in forked processes: the engine has a `DPScheduler` without,
and passes on the output of one host, or of the last stage. The copies of the others would never be acknowledged. Here
the `DPScheduler` gets what the engine asks it for: the number of workers that report.

It also counts them before it forks: a forked process must not ask Ray.

The statistics of the ranks' schedulers come with their other results; `DPScheduler` joins those, and drops the
connectors' part. Here it joins that, too.

vLLM's scheduler has work while its connector has copies in flight. A `DPScheduler` asks the ranks' schedulers for
requests only. A paused one has none, so a pause would end in the middle of a load, and its reset fail: the request
holds blocks. Here a rank with copies in flight answers that it has finished requests, which are to be cleared, too.

When a reset fails in one rank, `DPScheduler` raises, and leaves the answers of the ranks behind it unread. Each of
these would be taken for the answer to the next command, which ends the engine. Here they are read.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from vllm.config import SchedulerConfig

from tpu_offload.adapters.vllm.names import has_this_connector
from tpu_offload.adapters.vllm.patching import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats


@final
class ReportingWorkers:
    """In place of the connector of the engine's scheduler: all that vLLM asks it.

    Args:
      num_workers: workers that report each step.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def get_finished_count(self) -> int:
        """As in `TPUOffloadConnector`."""
        return self._num_workers


def join_reports_for_ranks() -> None:
    """Has engines with this connector and ranks join statistics, and the reports of all hosts or stages; idempotent.

    Called in every process of vLLM, before it makes schedulers.
    """
    wrap_once(SchedulerConfig, "get_scheduler_cls", _scheduler_cls)


def _scheduler_cls(original: Callable[[SchedulerConfig], Any], config: SchedulerConfig) -> Any:
    found = original(config)
    return _joining(found) if found.__name__ == "DPScheduler" else found


def _has_finished_requests_or_copies(original: Callable[[Any], bool], scheduler: Any) -> bool:
    connector = scheduler.connector
    return original(scheduler) or (connector is not None and connector.has_pending_push_work())


@functools.cache
def _joining(base: Any) -> Any:
    """tpu-inference's `DPScheduler` with what is described above."""

    from tpu_inference.core.sched.dp_scheduler import SchedulerCommand, SchedulerWorkerError
    from vllm.v1.core.sched.scheduler import Scheduler

    class JoiningScheduler(base):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, vllm_config: "VllmConfig", **kwargs: Any) -> None:
            from tpu_offload.adapters.vllm.settings import count_workers_of_ranks, has_several_workers
            from tpu_offload.adapters.vllm.stats import RankStats

            is_ours = has_this_connector(vllm_config)
            joins = is_ours and has_several_workers(vllm_config)
            num_workers = count_workers_of_ranks(vllm_config) if joins else 1
            if is_ours:  # before it forks
                wrap_once(Scheduler, "has_finished_requests", _has_finished_requests_or_copies)
            super().__init__(*args, vllm_config=vllm_config, **kwargs)
            self._offload_stats = RankStats(self.dp_size) if is_ours else None
            if joins:  # for one host, too: Ray's executors rely on it
                self.connector = ReportingWorkers(num_workers)

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
            try:
                return bool(super().reset_prefix_cache(*args, **kwargs))
            except SchedulerWorkerError as e:
                for rank in range(e.rank + 1, self.dp_size):
                    with contextlib.suppress(SchedulerWorkerError):  # the rank has logged it
                        self._get_result(rank, SchedulerCommand.RESET_PREFIX_CACHE)
                raise

        def _combine_scheduler_stats(self, rank_stats_list: "Sequence[SchedulerStats | None]") -> Any:
            combined = super()._combine_scheduler_stats(rank_stats_list)
            if combined is not None and self._offload_stats is not None:
                of_ranks = (stats.kv_connector_stats if stats else None for stats in rank_stats_list)
                combined.kv_connector_stats = self._offload_stats.join(of_ranks)
            return combined

    return JoiningScheduler
