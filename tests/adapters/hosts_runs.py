"""A real `vllm.LLM` on two hosts: the engine and its scheduler in this process, workers as in `vllm_hosts`.

    python -m tests.adapters.hosts_runs <runs.jsonl

Runs and outcomes are lines of JSON as in `llm_runs`, with the steps of `HostsRun`.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.adapters.llm_runs import CONNECTOR, ENGINE, MODELS, _sampling
from tests.adapters.rank_runs import install_probes, states_of_ranks
from tests.inside.connector import connector_scheduler

_SCARCE_NBYTES = 1_000_000  # free memory of host 1


class HostsRun:
    """One engine. Its public methods are the steps."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self._executor = self._core.model_executor
        self._conversations: dict[str, list[int]] = {}
        self._executor.collective_rpc(set_weights)

    def chat(self, said: dict[str, list[int]]) -> dict[str, Any]:
        """Adds tokens to conversations and generates the answers."""
        from vllm import TokensPrompt

        prompts = [self._conversations.get(name, []) + tokens for name, tokens in said.items()]
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], _sampling({}), use_tqdm=False
        )
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        for name, prompt, answer in zip(said, prompts, answers, strict=True):
            self._conversations[name] = prompt + answer
        return {"tokens": answers, "cached": [output.num_cached_tokens or 0 for output in outputs]}

    def forget(self) -> None:
        """Conversations begin anew, and HBM's prefix cache is emptied."""
        self._conversations.clear()
        self._llm.reset_prefix_cache()

    def fail(self, host: int, rates: dict[str, float]) -> None:
        """From now on copies on a host fail, or are slow, at these rates."""
        self._executor.collective_rpc(inject, args=(host, rates))

    def restart(self, host: int) -> None:
        """Starts a host's offload worker anew, with empty memory."""
        self._executor.collective_rpc(restart, args=(host,))

    def drain(self) -> None:
        """Serves short prompts until no copy is in flight."""
        from vllm import TokensPrompt

        for number in range(200):
            if not connector_scheduler(self._core.scheduler.connector.scheduler_side).has_jobs:
                return
            self._llm.generate([TokensPrompt(prompt_token_ids=[3 + number])], _sampling({}), use_tqdm=False)
        raise AssertionError("copies are in flight for ever")

    def stats(self) -> dict[str, Any]:
        """The library's counters, and the chunks that each host has memory for."""
        side = self._core.scheduler.connector.scheduler_side
        side.check_invariants()
        stats = connector_scheduler(side).stats()
        counts = {name: getattr(stats, name) for name in stats.__slots__}
        return counts | {"num_host_chunks_of": self._executor.collective_rpc(num_host_chunks)}

    def shuffle_host_memory(self) -> None:
        """Moves the contents of every block in the host pools to the next one."""
        self._executor.collective_rpc(shuffle)

    def kill(self, host: int) -> str:
        """A host dies while a request is served; returns how the engine ends."""
        self._executor.kill(host)
        try:
            self.chat({"last": [5] * 40})
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return ""


class RankedHostsRun(HostsRun):
    """One engine with data-parallel ranks, whose schedulers are in processes of their own."""

    def drain(self) -> None:
        """Serves short prompts on all ranks until no copy is in flight: a rank learns of results with its next one."""
        from vllm import TokensPrompt

        for number in range(50):
            states = self._states()
            if not any(state["has_jobs"] for state in states):
                return
            prompts = [TokensPrompt(prompt_token_ids=[3 + number, 5 + rank]) for rank in range(len(states))]
            self._llm.generate(prompts, _sampling({}), use_tqdm=False)
        raise AssertionError("copies are in flight for ever")

    def stats(self) -> dict[str, Any]:
        """The library's counters, by rank, and the chunks that each host has memory for."""
        ranks = [state["stats"] for state in self._states()]
        return {"ranks": ranks, "num_host_chunks_of": self._executor.collective_rpc(num_host_chunks)}

    def _states(self) -> list[dict[str, Any]]:
        return states_of_ranks(self._core.scheduler)


# On the hosts.


def shuffle(worker: Any) -> None:
    from tests.adapters.llm_probes import shuffle_host_memory

    shuffle_host_memory(_side().worker)


def set_weights(worker: Any) -> None:
    from tests.adapters.llm_probes import set_random_weights

    set_random_weights(worker.model_runner)


def inject(worker: Any, host: int, rates: dict[str, float]) -> None:
    import jax

    from tests.inside.worker import tier_groups
    from tests.multiprocess.faulty import DispatchLog
    from tests.multiprocess.messages import Faults

    if jax.process_index() == host:
        log = DispatchLog(Faults(**rates), random.Random(host))
        for group in tier_groups(_side().worker):
            group.copiers = {d: log.wrap(copier, group.memory.arena) for d, copier in group.copiers.items()}


def restart(worker: Any, host: int) -> None:
    import jax

    if jax.process_index() == host:
        _side().register(worker.model_runner)


def num_host_chunks(worker: Any) -> int:
    return int(_side().worker.num_host_chunks)


def _side() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side


def run(spec: dict[str, Any], models: Path) -> dict[str, Any]:
    """One run from start to end."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    settings = ENGINE | spec.get("engine", {})
    if spec.get("connector"):
        settings["kv_transfer_config"] = KVTransferConfig(**CONNECTOR | spec["connector"])
    name = spec.get("model", "qwen3")
    model = models / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[name]))
    llm = LLM(model=str(model), **settings)
    is_ranked = hasattr(llm.llm_engine.engine_core.engine_core.scheduler, "dp_size")
    hosts_run = RankedHostsRun(llm) if is_ranked else HostsRun(llm)
    try:
        steps = [
            getattr(hosts_run, step["do"])(**{k: v for k, v in step.items() if k != "do"}) for step in spec["steps"]
        ]
    finally:
        hosts_run._executor.shutdown()
    return {"error": None, "steps": steps}


def main() -> None:
    """Reads runs, writes outcomes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of vLLM
    import cpu_shim

    cpu_shim.install()
    from vllm.v1.executor.abstract import Executor

    from tests.adapters.vllm_hosts import HostsExecutor, NodesOfRay

    NodesOfRay(HostsExecutor.num_hosts).install()
    install_probes()
    HostsExecutor.available_nbytes = 0, _SCARCE_NBYTES
    Executor.get_class = staticmethod(lambda vllm_config: HostsExecutor)  # in place of the one for Ray
    with tempfile.TemporaryDirectory() as models:
        for line in sys.stdin:
            try:
                outcome = run(json.loads(line), Path(models))
            except Exception as e:
                outcome = {"error": f"in a step: {type(e).__name__}: {e}"}
            answers.write(json.dumps(outcome) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
