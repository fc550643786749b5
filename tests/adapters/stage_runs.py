"""Runs of a real `vllm.LLM` with pipeline stages, as in `llm_runs`: this process schedules, each stage has its own.

    python -m tests.adapters.stage_runs <runs.jsonl

As in production the stages are forked, so this process must not use a device.
"""

from collections.abc import Callable
from typing import Any

from tests.adapters.llm_probes import (
    break_loads,
    break_reads,
    count_calls,
    lose_caches,
    set_random_weights,
    shuffle_host_memory,
)
from tests.adapters.llm_runs import EngineRun, main
from tests.adapters.rank_runs import RankedSteps
from tests.inside.connector import open_loads
from tests.inside.worker import tier_groups


class StageRun(EngineRun):
    """One engine. Faults are made in one stage."""

    def _take(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._conversations: dict[int, list[int]] = {}
        self._num_ids = 0
        self._watch()
        self._in_stages(_count_transfers)

    def _watch(self) -> None:
        self._preempted = count_calls(self._scheduler, "_preempt_request")

    def _in_stages(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function of vLLM's worker in each stage. Returns the results by stage."""
        results: list[Any] = self._core.model_executor.collective_rpc(function, args=args)
        return results

    def _worker_state(self) -> dict[str, Any]:
        stages = self._in_stages(_state_of_stage)
        return {
            "wrong_tokens": [],
            "num_queued_steps": len(self._core.batch_queue),
            "has_flights": any(stage.pop("has_flights", False) for stage in stages),
            "stages": stages,
        }

    def owned(self) -> list[Any]:
        return []

    def close(self) -> None:
        self._core.shutdown()

    # Steps.

    def set_random_weights(self) -> None:
        """As in engines without stages; without this step they have those on disk, or vLLM's dummy weights."""
        self._in_stages(_set_random_weights)

    def shuffle_host_memory(self, stage: int) -> None:  # type: ignore[override]
        self._in_stages(_in_one_stage, stage, shuffle_host_memory)

    def break_loads(self, times: int, stage: int, method: str = "load") -> None:  # type: ignore[override]
        self._in_stages(_in_one_stage, stage, break_loads, times, method)

    def lose_caches(self, skip: list[int], stage: int, method: str = "load") -> None:  # type: ignore[override]
        self._in_stages(_in_one_stage, stage, lose_caches, skip, method)

    def break_reads(self, times: int, stage: int) -> None:
        """Has the next reads of storage fail in this stage."""
        self._in_stages(_in_one_stage, stage, break_reads, times)


class RankedStageRun(RankedSteps, StageRun):
    """One engine with data-parallel ranks in each stage."""


# These run in the processes of the stages; `wrapper` is vLLM's wrapper of tpu-inference's worker.


def _in_one_stage(wrapper: Any, stage: int, function: Callable[..., Any], *args: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if wrapper.worker.rank == stage:
        function(get_kv_transfer_group().worker_side.worker, *args)


def _set_random_weights(wrapper: Any) -> None:
    set_random_weights(wrapper.worker.model_runner)


def _count_transfers(wrapper: Any) -> None:
    """Counts the activations that a stage sends, and that it asks for."""
    from tpu_inference.distributed.jax_parallel_state import get_pp_group

    group = get_pp_group()
    wrapper.num_sent = count_calls(group, "send_tensor_dict")
    wrapper.num_asked, receive = [], group.recv_tensor_dict

    def count(uuid: int, spec: dict[str, Any]) -> Any:
        if spec:
            wrapper.num_asked.append(None)
        return receive(uuid, spec)

    group.recv_tensor_dict = count


def _state_of_stage(wrapper: Any) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    state = {
        "num_layers": len(wrapper.worker.model_runner.kv_caches),
        "num_sent": len(wrapper.num_sent),
        "num_asked": len(wrapper.num_asked),
    }
    if has_kv_transfer_group():
        side = get_kv_transfer_group().worker_side
        state["has_flights"] = side.worker.has_flights
        state["num_host_chunks"] = side.worker.num_host_chunks
        state["num_page_groups"] = len(tier_groups(side.worker))
        state["num_open_loads"] = len(open_loads(side))
    return state


if __name__ == "__main__":
    main()
