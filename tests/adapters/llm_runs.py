"""Runs of a real `vllm.LLM` with a tiny random model, on the CPU, one after another in one process.

    python -m tests.adapters.llm_runs <runs.jsonl

Each line of the input describes a run, each line of the output its outcome; everything else goes to stderr. Importing
vLLM takes most of a minute and a run some seconds, so a test sends its runs to a process that is already started.

A run:

    engine      arguments of `LLM` over `ENGINE`
    connector   null, or arguments of `KVTransferConfig` over those of our connector
    env         TPU_OFFLOAD_* of this run
    hbm_nbytes  null, or the HBM of a device; live arrays count as used
    steps       [{"do": name of a method of EngineRun, **its arguments}]

Its outcome: `error`, the message with which the engine refused to start; or `steps`, the result of each step, `end`,
the state when all copies had ended, and `freed`, whether the runner's caches and the host pool were freed with the
engine.
"""

import contextlib
import functools
import gc
import json
import logging
import os
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

from tests.inside import tier_group

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "use_sliding_window": False, "max_window_layers": 2,
}  # fmt: skip
ENGINE = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "block_size": 16, "num_gpu_blocks_override": 24, "gpu_memory_utilization": 0.5,
    "enforce_eager": True, "dtype": "bfloat16", "enable_prefix_caching": True, "async_scheduling": False,
    "disable_log_stats": False,
}  # fmt: skip
CONNECTOR = {
    "kv_connector": "TPUOffloadConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "tpu_offload.adapters.vllm", "kv_load_failure_policy": "recompute",
}  # fmt: skip
_STEP_LIMIT = 3000
_DRAIN_LIMIT_S = 30.0


class EngineRun:
    """One engine. Its public methods are the steps."""

    def __init__(self, llm: Any, model: str) -> None:
        self._model = model
        self._take(llm)

    def _take(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._conversations: dict[int, list[int]] = {}
        self._num_ids = 0
        self._batches: list[Any] = []
        self._preempted = _count_calls(self._scheduler, "_preempt_request")
        self.runner = self._core.model_executor.driver_worker.worker.model_runner
        self._fed_tokens = _FedTokens(self._scheduler, self.runner)
        _give_weights(self.runner)

    @property
    def connector(self) -> Any:
        return self._scheduler.connector

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side.worker

    # Steps.

    def generate(self, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:
        """All prompts at once."""
        from vllm import TokensPrompt

        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=p) for p in prompts], _sampling(sampling), use_tqdm=False
        )
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "cached": [o.num_cached_tokens or 0 for o in outputs],
            "finish": [o.outputs[0].finish_reason for o in outputs],
        }

    def sample(self, prompts: list[list[int]], seed: int, **sampling: Any) -> dict[str, Any]:
        """One prompt after the other, each with the random numbers of a fresh engine.

        On TPU, requests have no seeds, and each step takes the engine's next random number.
        """
        import jax

        outcomes = []
        for prompt in prompts:
            self.runner.rng_params_for_sampling = jax.device_put(
                jax.random.key(seed), self.runner.rng_params_for_sampling.sharding
            )
            outcomes.append(self.generate([prompt], **sampling))
        return {name: [value for outcome in outcomes for value in outcome[name]] for name in outcomes[0]}

    def chat(self, said: dict[str, list[int]], **sampling: Any) -> dict[str, Any]:
        """Adds tokens to conversations and generates the answers, in the order given."""
        numbers = [int(number) for number in said]
        prompts = [self._conversations.get(int(number), []) + tokens for number, tokens in said.items()]
        outcome = self.generate(prompts, **sampling)
        for number, prompt, answer in zip(numbers, prompts, outcome["tokens"], strict=True):
            self._conversations[number] = prompt + answer
        return outcome

    def drive(
        self,
        prompts: list[list[int]],
        abort: dict[str, str],
        reset_when: str = "",
        preempt_at: list[int] = (),  # type: ignore[assignment]
        pause: bool = False,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Steps the engine and intervenes between the steps.

        Args:
          prompts: one per request.
          abort: by index, the vLLM status in which a request is aborted.
          reset_when: the vLLM status at whose first occurrence all caches are reset.
          preempt_at: numbers of tokens of the first request at which all are preempted and HBM is emptied.
          pause: preempt by a pause, which waits for the step in flight, as in a served engine.
          sampling: settings of `SamplingParams`.
        """
        from vllm import TokensPrompt
        from vllm.v1.core.sched.interface import PauseState

        engine = self._llm.llm_engine
        ids: list[tuple[str, str]] = []  # ours and the engine's
        for prompt in prompts:
            self._num_ids += 1
            name = f"driven-{self._num_ids}"
            ids.append((name, engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), _sampling(sampling))))
        tokens: list[list[int]] = [[] for _ in ids]
        seen: list[list[str]] = [[] for _ in ids]
        due = {int(i): status for i, status in abort.items()}
        aborted, preempt_at, pausing = [], list(preempt_at), False
        for _ in range(_STEP_LIMIT):
            for i, (external, internal) in enumerate(ids):
                request = self._scheduler.requests.get(internal)
                if request is None:
                    continue
                if request.status.name not in seen[i]:
                    seen[i].append(request.status.name)
                if request.status.name == reset_when:
                    reset_when = ""
                    self.reset()
                if due.get(i) == request.status.name:
                    del due[i]
                    aborted.append(i)
                    engine.abort_request([external])
            if not engine.has_unfinished_requests():
                break
            if pausing and not self._core.batch_queue:
                pausing = False
                self._core.pause_scheduler("keep", clear_cache=True)
                self._core.resume_scheduler()
            if preempt_at and len(tokens[0]) >= preempt_at[0]:
                del preempt_at[0]
                if pause:
                    pausing = True
                    self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
                    continue
                with contextlib.suppress(RuntimeError):  # blocks of a step in flight are not free yet
                    self._llm.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step():
                index = next(i for i, (external, _) in enumerate(ids) if external == output.request_id)
                tokens[index] = list(output.outputs[0].token_ids)
        return {"tokens": tokens, "aborted": aborted, "seen": seen, "hung": engine.has_unfinished_requests()}

    def drain(self) -> dict[str, Any]:
        """Steps until the engine is idle, as vLLM's own loop does. Returns the state."""
        deadline_s = time.monotonic() + _DRAIN_LIMIT_S
        while self._scheduler.has_requests() and time.monotonic() < deadline_s:
            self._llm.llm_engine.step()
        return self.state()

    def state(self) -> dict[str, Any]:
        """The state of the engine and of the connector."""
        pool = self._scheduler.kv_cache_manager.block_pool
        state = {
            "num_free_blocks": pool.get_num_free_blocks(),
            "num_blocks": pool.num_gpu_blocks,
            "num_requests": len(self._scheduler.requests),
            "num_preemptions": len(self._preempted),
            "wrong_tokens": self._fed_tokens.wrong(),
        }
        if self.connector is None:
            return state
        side = self.connector.scheduler_side
        side.check_invariants()
        stats = side._offload.stats()
        return state | {
            "stats": {name: getattr(stats, name) for name in stats.__slots__},
            "num_active": len(side._active) + len(side._promised),
            "has_jobs": side.has_jobs,
            "has_flights": self.worker.has_flights,
            "num_host_chunks": self.worker.num_host_chunks,
        }

    def shuffle_host_memory(self) -> None:
        """Moves the contents of every block in the host pool to the next one."""
        import jax
        import numpy as np

        pool = tier_group(self.worker).memory.pool
        pool.wait_until_allocated()
        for i, segment in enumerate(pool._segments):
            pool.replace(i, [jax.device_put(np.roll(np.asarray(part), 1, axis=0), part.sharding) for part in segment])

    def break_loads(self, times: int, method: str = "load") -> None:
        """Has the next loads fail, in this method of the copier."""
        from tpu_offload.types import Direction

        copier, left = tier_group(self.worker).copiers[Direction.LOAD], [times]
        load = getattr(copier, method)

        def fail(*args: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("made to fail")
            return load(*args)

        setattr(copier, method, fail)

    def lose_caches(self, skip: list[int], method: str = "load") -> None:
        """Has loads destroy the KV caches: one after each of these numbers of other loads."""
        from tpu_offload.types import Direction

        copier, left = tier_group(self.worker).copiers[Direction.LOAD], list(skip)
        load = getattr(copier, method)

        def fail(*args: Any) -> Any:
            if not left:
                return load(*args)
            left[0] -= 1
            if left[0] >= 0:
                return load(*args)
            del left[0]
            args[-1][0].delete()
            raise RuntimeError("made to fail")

        setattr(copier, method, fail)

    def reset(self) -> bool:
        """Empties HBM's prefix cache and the host tier."""
        return self._llm.reset_prefix_cache(reset_connector=True)

    def reset_hbm(self) -> bool:
        """Empties HBM's prefix cache only."""
        return self._llm.reset_prefix_cache()

    def replace(self, spec: dict[str, Any]) -> None:
        """Creates another engine before this one is released."""
        llm = _engine(spec, self._model)
        self._take(llm)
        gc.collect()

    def registered(self) -> list[str]:
        """Connectors that vLLM knows by name."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        return sorted(KVConnectorFactory._registry)

    def record_events(self) -> None:
        """Records KV events from now on."""
        self._scheduler.kv_event_publisher = _Publisher(self._batches)

    def events(self) -> list[tuple[str, str, list[str]]]:
        """Kind, medium and hashes of the published events."""
        return [
            (type(event).__name__, event.medium, [str(block_hash) for block_hash in event.block_hashes])
            for batch in self._batches
            for event in batch.events
            if hasattr(event, "block_hashes")
        ]

    def metrics(self) -> dict[str, Any]:
        """The connector's series on vLLM's Prometheus endpoint."""
        return {
            metric.name: getattr(metric, "value", None) or getattr(metric, "count", 0.0)
            for metric in self._llm.get_metrics()
            if metric.name.startswith("vllm:tpu_offload_")
        }

    def log_stats(self) -> list[str]:
        """vLLM's own statistics lines."""
        with _captured("vllm") as lines:
            self._llm.llm_engine.do_log_stats()
        return lines


def _count_calls(owner: Any, name: str) -> list[None]:
    """A list with an entry for each call. It must not refer to `EngineRun`, or the engine would never be collected."""
    calls: list[None] = []
    method = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    setattr(owner, name, count)
    return calls


class _FedTokens:
    """Compares every token that the model was given with those that vLLM has hashed.

    KV is saved under hashes of tokens; the KV of a position is that of the last token that the model was given there.
    Like `_count_calls`, this must not refer to `EngineRun`; nor do the engine's objects outlive the engine in it.
    """

    def __init__(self, scheduler: Any, runner: Any) -> None:
        self._steps: list[tuple[list[tuple[str, int, int]], Any]] = []
        self._fed: dict[str, dict[int, int]] = {}
        self._hashed: dict[str, list[int]] = {}
        self._wrong: list[tuple[str, int, int, int]] = []
        steps, hashed = self._steps, self._hashed
        rows: list[tuple[str, int, int]] = []
        prepare, model, free = runner._prepare_inputs, runner.model_fn, scheduler._free_request
        batch, size = runner.input_batch, scheduler.block_size

        def prepare_inputs(output: Any) -> Any:
            prepared = prepare(output)
            rows[:] = [
                (request_id, int(batch.num_computed_tokens_cpu[i]), output.num_scheduled_tokens[request_id])
                for i, request_id in enumerate(batch.req_ids[: batch.num_reqs])
            ]
            return prepared

        def run_model(weights: Any, kv_caches: Any, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
            steps.append((list(rows), token_ids))
            return model(weights, kv_caches, token_ids, *args, **kwargs)

        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            computed = request.num_computed_tokens - request.num_output_placeholders
            hashed[request.request_id] = list(request.all_token_ids[: min(computed, len(request.block_hashes) * size)])
            return free(request, *args, **kwargs)

        runner._prepare_inputs, runner.model_fn, scheduler._free_request = prepare_inputs, run_model, free_request

    def wrong(self) -> list[tuple[str, int, int, int]]:
        """Differences in ended requests: request, position, the model's token and vLLM's."""
        import numpy as np

        for rows, token_ids in self._steps:
            values, at = np.asarray(token_ids).tolist(), 0
            for request_id, first, count in rows:
                fed = self._fed.setdefault(request_id, {})
                fed.update(zip(range(first, first + count), values[at : at + count], strict=True))
                at += count
        self._steps.clear()
        for request_id, known in self._hashed.items():
            fed = self._fed.pop(request_id, {})
            self._wrong += [
                (request_id, i, fed[i], token) for i, token in enumerate(known) if fed.get(i, token) != token
            ]
        self._hashed.clear()
        return self._wrong


class _Publisher:
    """Records events in place of vLLM's publisher."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def publish(self, batch: Any) -> None:
        self._batches.append(batch)

    def shutdown(self) -> None:
        pass


def _sampling(settings: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False} | settings)


@contextlib.contextmanager
def _captured(*names: str) -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Any:
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def _hbm_nbytes() -> int:
    import jax

    return sum(
        array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind in (None, "device", "unpinned_host")
    )


@contextlib.contextmanager
def _hbm(nbytes: int | None) -> Any:
    """Simulates devices with this much HBM; arrays created from now on count as used."""
    from tpu_inference import utils

    if nbytes is None:
        yield
        return
    usage, before = utils.hbm_usage_bytes, _hbm_nbytes()
    utils.hbm_usage_bytes = lambda devices: [(_hbm_nbytes() - before, nbytes) for _ in devices]
    try:
        yield
    finally:
        utils.hbm_usage_bytes = usage


def _engine(spec: dict[str, Any], model: str) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    settings = ENGINE | spec.get("engine", {})
    if settings.get("num_gpu_blocks_override") == 0:  # as many as fit
        del settings["num_gpu_blocks_override"]
    if "kv_events_config" in settings:
        settings["kv_events_config"] = KVEventsConfig(**settings["kv_events_config"])
    if spec.get("connector") is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**CONNECTOR | spec["connector"])
    return LLM(model=model, **settings)


def _give_weights(runner: Any) -> None:
    """Sets random weights with which the next token depends on all tokens before it.

    With vLLM's dummy weights it depends on the last token alone, so no test would detect a wrong KV cache.
    """
    import jax

    weights, tree = jax.tree_util.tree_flatten_with_path(runner.state)
    leaves = [
        jax.device_put(_weight(index, jax.tree_util.keystr(path), weight.shape, weight.dtype), weight.sharding)
        for index, (path, weight) in enumerate(weights)
    ]
    runner.state = jax.tree_util.tree_unflatten(tree, leaves)
    runner.state_leaves = tuple(leaves)


@functools.cache
def _weight(index: int, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    import jax
    import numpy as np

    if len(shape) == 1:
        return np.full(shape, 2.0 if "q_norm" in name or "k_norm" in name else 1.0, dtype)
    scale = 0.5 if "embed" in name else 1 / 16  # a small residual, so that attention has an effect
    return np.asarray(scale * jax.random.normal(jax.random.key(index), shape, dtype))


def _one_line(error: BaseException) -> str:
    """The innermost cause, which ends the traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def run(spec: dict[str, Any], model: str) -> dict[str, Any]:
    """One run from start to end."""
    gc.collect()
    with _environment(spec.get("env", {})), _hbm(spec.get("hbm_nbytes")), _captured("vllm", "tpu_offload") as log:
        try:
            llm = _engine(spec, model)
        except Exception as e:
            error = _one_line(e)
            _clean_up()
            return {"error": error, "log": log}
        engine_run = EngineRun(llm, model)
        outcome: dict[str, Any] = {"error": None}
        outcome["steps"] = [
            getattr(engine_run, step["do"])(**{k: v for k, v in step.items() if k != "do"}) for step in spec["steps"]
        ]
        outcome["end"] = engine_run.drain()
        left = [weakref.ref(engine_run.runner), weakref.ref(engine_run.runner.kv_caches[0])]
        if engine_run.connector is not None:
            left.append(weakref.ref(tier_group(engine_run.worker).memory.pool))
        del engine_run, llm
        gc.collect()
        return outcome | {"freed": [ref() is None for ref in left], "log": log}


def _clean_up() -> None:
    """Cleans up after an engine that did not start; in production its process would end."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    gc.unfreeze()
    cleanup_dist_env_and_memory()


def _freeze_imports() -> None:
    """Has the garbage collector skip the million objects of vLLM, torch and jax, where a run spent most of its time.

    vLLM freezes them as well, but together with the engine, and unfreezes all when it ends.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def main() -> None:
    """Reads runs, writes outcomes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of vLLM
    import cpu_shim

    cpu_shim.install()
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        for number, line in enumerate(sys.stdin):
            try:
                outcome = run(json.loads(line), model)
            except Exception as e:
                logging.getLogger("vllm").exception("a run failed")
                outcome = {"error": f"in a step: {_one_line(e)}"}
                _clean_up()
            answers.write(json.dumps(outcome) + "\n")
            answers.flush()
            if number == 0:  # the first run has imported everything
                _freeze_imports()


if __name__ == "__main__":
    main()
