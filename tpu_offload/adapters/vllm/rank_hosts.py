"""Data-parallel ranks on several hosts: joins what the hosts report, which tpu-inference 0.32 does not.

vLLM's executors join the outputs of the connectors of several workers if the engine's scheduler has a connector. With
ranks, the schedulers that have one are in forked processes: the engine has a `DPScheduler` without, and passes on the
output of one host. The copies of the others would never be acknowledged. Here the `DPScheduler` gets what the engine
asks it for: the number of workers that report.

It also counts the hosts, which forked processes cannot: they must not ask Ray.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from vllm.config import SchedulerConfig

from tpu_offload.adapters.vllm.names import has_this_connector
from tpu_offload.adapters.vllm.wrap_once import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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


def join_reports_of_hosts() -> None:
    """Has engines with this connector and ranks on several hosts join the reports of all hosts; idempotent.

    Called in every process of vLLM, before it makes schedulers.
    """
    wrap_once(SchedulerConfig, "get_scheduler_cls", _scheduler_cls)


def _scheduler_cls(original: Callable[[SchedulerConfig], Any], config: SchedulerConfig) -> Any:
    found = original(config)
    return _joining(found) if found.__name__ == "DPScheduler" else found


@functools.cache
def _joining(base: Any) -> Any:
    """tpu-inference's `DPScheduler`, which counts hosts before it forks and says how many workers report."""

    class JoiningScheduler(base):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, vllm_config: "VllmConfig", **kwargs: Any) -> None:
            from tpu_offload.adapters.vllm.settings import count_hosts_of_ranks, multihost_backend

            joins = has_this_connector(vllm_config) and multihost_backend() != ""
            num_hosts = count_hosts_of_ranks() if joins else 1
            super().__init__(*args, vllm_config=vllm_config, **kwargs)
            if joins:  # for one host, too: Ray's executors rely on it
                self.connector = ReportingWorkers(num_hosts)

    return JoiningScheduler
