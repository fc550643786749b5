"""Runs of a real `vllm.LLM` with a tiny random model, on the CPU, one after another in one process.

    python -m tests.adapters.llm_runs <runs.jsonl

Each line of the input describes a run, each line of the output its outcome; everything else goes to stderr. Importing
vLLM takes most of a minute and a run some seconds, so a test sends its runs to a process that is already started.

A run:

    model       one of MODELS; or, with weights on disk, "tiny", of three layers, "tiny, 7 layers", or a folder; without
                it, qwen3
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
import gc
import json
import logging
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.adapters.llm_probes import (
    EventRecorder,
    FedTokens,
    break_loads,
    captured_log,
    count_calls,
    die_with_parent,
    environment_of,
    inspect_models_here,
    lose_caches,
    set_random_weights,
    share_models,
    shuffle_host_memory,
    simulated_hbm,
)
from tests.inside.connector import connector_scheduler
from tests.inside.worker import tier_groups
from tests.ports import free_ports

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "use_sliding_window": False, "max_window_layers": 2,
}  # fmt: skip
_GEMMA4_TEXT = {
    "model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "layer_types": 2 * ["sliding_attention", "full_attention"], "sliding_window": 40,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "global_head_dim": 256,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size": 1024,
    "vocab_size_per_layer_input": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 6, "layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
    "query_pre_attn_scalar": 128, "vocab_size": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
    "rope_theta": 10000.0, "rope_local_base_freq": 10000.0, "torch_dtype": "bfloat16", "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 8, "layer_types": 2 * [*3 * ["linear_attention"], "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32", "attn_output_gate": True, "vocab_size": 1024, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "first_k_dense_replace": 2, "moe_layer_freq": 1, "n_routed_experts": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 128, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "vocab_size": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3, 4 heads": QWEN3 | {"num_attention_heads": 4},
    # Sliding windows and full attention: three KV cache groups of two layers each.
    "gemma3": _GEMMA3,
    "gemma3, half the window": _GEMMA3 | {"sliding_window": 32},
    # Gated delta nets and full attention: three KV cache groups of states and one of blocks.
    "qwen3.5": _QWEN3_5,
    # Latent attention, with dense layers only.
    "deepseek": _DEEPSEEK,
    # Two page shapes in one KV cache group.
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4", "text_config": _GEMMA4_TEXT,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "vision_config": None, "audio_config": None,
    },
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
STEP_LIMIT = 3000
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
        self.runner = self._core.model_executor.driver_worker.worker.model_runner
        self._watch()
        if not Path(self._model, "model.safetensors").exists():
            set_random_weights(self.runner)

    def _watch(self) -> None:
        self._preempted = count_calls(self._scheduler, "_preempt_request")
        self._fed_tokens = FedTokens(self._scheduler, self.runner)

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
            "prompt_logprobs": [_by_position(o.prompt_logprobs) for o in outputs],
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
        from vllm.v1.core.sched.interface import PauseState

        engine = self._llm.llm_engine
        ids = [self._add_request(prompt, sampling) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in ids]
        prompt_logprobs: list[Any] = [None for _ in ids]
        seen: list[list[str]] = [[] for _ in ids]
        due = {int(i): status for i, status in abort.items()}
        aborted, preempt_at, pausing = [], list(preempt_at), False
        for _ in range(STEP_LIMIT):
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
                prompt_logprobs[index] = _by_position(output.prompt_logprobs)
        return {
            "tokens": tokens,
            "prompt_logprobs": prompt_logprobs,
            "aborted": aborted,
            "seen": seen,
            "hung": engine.has_unfinished_requests(),
        }

    def _add_request(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[str, str]:
        """Adds a request. Returns its id and the engine's id of it."""
        from vllm import TokensPrompt

        self._num_ids += 1
        name = f"driven-{self._num_ids}"
        prompt_tokens = TokensPrompt(prompt_token_ids=prompt)
        return name, self._llm.llm_engine.add_request(name, prompt_tokens, _sampling(sampling))

    def drain(self) -> dict[str, Any]:
        """Steps until the engine is idle, as vLLM's own loop does. Returns the state."""
        deadline_s = time.monotonic() + _DRAIN_LIMIT_S
        while (self._scheduler.has_requests() or self._core.batch_queue) and time.monotonic() < deadline_s:
            self._llm.llm_engine.step()
        return self.state()

    def state(self) -> dict[str, Any]:
        """The state of the engine and of the connector."""
        state = state_of(self._scheduler) | {"num_preemptions": len(self._preempted)}
        return state | self._worker_state()

    def _worker_state(self) -> dict[str, Any]:
        wrong = {"wrong_tokens": self._fed_tokens.wrong()}
        return wrong | (state_of_worker(self.worker) if self.connector is not None else {})

    def owned(self) -> list[weakref.ref[Any]]:
        """Objects that are to be freed with the engine."""
        import jax

        owned = [weakref.ref(self.runner), weakref.ref(jax.tree.leaves(self.runner.kv_caches)[0])]
        if self.connector is not None:
            owned.append(weakref.ref(tier_groups(self.worker)[0].memory.arena))
        return owned

    def close(self) -> None:
        """Called before the engine is released."""

    def kv_layout(self) -> dict[str, Any]:
        """KV cache groups as the scheduler has them, and the arrays of the worker."""
        import jax

        index = self.runner.layer_name_to_kvcache_index
        return {
            "num_blocks": self._scheduler.kv_cache_config.num_blocks,
            "num_tokens": self.runner.vllm_config.cache_config.kv_cache_size_tokens,
            "groups": [
                {
                    "spec": type(group.kv_cache_spec).__name__,
                    "window": getattr(group.kv_cache_spec, "sliding_window", None),
                    "block_size": group.kv_cache_spec.block_size,
                    "layers": group.layer_names,
                    "arrays": [index[name] for name in group.layer_names],
                }
                for group in self._scheduler.kv_cache_config.kv_cache_groups
            ],
            "arrays": [
                [[str(array.dtype), *array.shape] for array in jax.tree.leaves(caches)]
                for caches in self.runner.kv_caches
            ],
        }

    def scramble_hbm(self, group: int) -> int:
        """Exchanges the contents of the blocks of a KV cache group in vLLM's prefix cache. Returns their number."""
        import jax
        import numpy as np
        from vllm.v1.core.kv_cache_utils import get_group_id
        from vllm.v1.kv_cache_interface import MambaSpec

        spec, pool = self._scheduler.kv_cache_config.kv_cache_groups[group], self._scheduler.kv_cache_manager.block_pool
        if isinstance(spec.kv_cache_spec, MambaSpec):  # all groups of states have the blocks of the first
            known = [block for block in pool.mamba_pool.blocks if block.block_hash]
        else:
            known = [block for block in pool.blocks if block.block_hash and get_group_id(block.block_hash) == group]
        rows = np.array([block.block_id for block in known], np.int32)

        def scrambled(array: Any) -> Any:
            values = np.asarray(array).copy()
            values[rows] = values[np.roll(rows, 1)]
            return jax.device_put(values, array.sharding)

        for i in {self.runner.layer_name_to_kvcache_index[name] for name in spec.layer_names}:
            self.runner.kv_caches[i] = jax.tree.map(scrambled, self.runner.kv_caches[i])
        return len(rows)

    def shuffle_host_memory(self, group: int | None = None) -> None:
        """Moves the contents of every block in the host pool, of a page group or of all, to the next one."""
        shuffle_host_memory(self.worker, group)

    def break_loads(self, times: int, method: str = "load", group: int = 0) -> None:
        """Has the next loads fail, in this method of the copier of a page group."""
        break_loads(self.worker, times, method, group)

    def lose_caches(self, skip: list[int], method: str = "load", group: int = 0) -> None:
        """Has loads of a page group destroy the KV caches: one after each of these numbers of other loads."""
        lose_caches(self.worker, skip, method, group)

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
        self._scheduler.kv_event_publisher = EventRecorder(self._batches)

    def events(self) -> list[str]:
        """The events published so far, as JSON; hashes that are bytes are in base64."""
        return [msgspec.json.encode(event).decode() for batch in self._batches for event in batch.events]

    def metrics(self) -> dict[str, Any]:
        """The connector's series on vLLM's Prometheus endpoint."""
        return {
            metric.name: getattr(metric, "value", None) or getattr(metric, "count", 0.0)
            for metric in self._llm.get_metrics()
            if metric.name.startswith("vllm:tpu_offload_")
        }

    def log_stats(self) -> list[str]:
        """vLLM's own statistics lines."""
        with captured_log("vllm") as lines:
            self._llm.llm_engine.do_log_stats()
        return lines


def state_of(scheduler: Any) -> dict[str, Any]:
    """The state of a scheduler and of its connector."""
    pool = scheduler.kv_cache_manager.block_pool
    rows = getattr(pool, "mamba_pool", None)
    state = {
        "num_free_rows": rows and rows.get_num_free_blocks(),
        "num_rows": rows and rows.num_gpu_blocks,
        "num_free_blocks": pool.get_num_free_blocks(),
        "num_blocks": pool.num_gpu_blocks,
        "num_requests": len(scheduler.requests),
    }
    if scheduler.connector is None:
        return state
    side = scheduler.connector.scheduler_side
    side.check_invariants()
    if not (scheduler.requests or side.has_jobs):  # a load of a request that was aborted is waited for
        side.check_empty()
    stats = connector_scheduler(side).stats()
    return state | {
        "stats": {name: getattr(stats, name) for name in stats.__slots__},
        "has_jobs": side.has_jobs,
    }


def state_of_worker(worker: Any) -> dict[str, Any]:
    """The state of the library's worker."""
    return {
        "has_flights": worker.has_flights,
        "num_host_chunks": worker.num_host_chunks,
        "num_page_groups": len(tier_groups(worker)),
    }


def _by_position(logprobs: Any) -> list[list[tuple[int, float]]]:
    """For each token of a prompt but the first: known tokens, of which it is the first, and their log probabilities."""
    return [[(token, entry.logprob) for token, entry in entries.items()] for entries in (logprobs or ())[1:]]


def _sampling(settings: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "structured_outputs" in settings:
        settings = settings | {"structured_outputs": StructuredOutputsParams(**settings["structured_outputs"])}
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False} | settings)


def _engine(spec: dict[str, Any], model: str) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    settings = ENGINE | spec.get("engine", {})
    if settings.get("num_gpu_blocks_override") == 0:  # as many as fit
        del settings["num_gpu_blocks_override"]
    if "kv_events_config" in settings:
        settings["kv_events_config"] = KVEventsConfig(**settings["kv_events_config"])
    if (num_stages := settings.get("pipeline_parallel_size", 1)) > 1:
        import cpu_shim

        cpu_shim.have_stages_listen(free_ports(num_stages)[0])
    if spec.get("connector") is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**CONNECTOR | spec["connector"])
    return LLM(model=model, **settings)


def _run_class(llm: Any) -> type[EngineRun]:
    from tests.adapters.rank_runs import RankedRun
    from tests.adapters.stage_runs import RankedStageRun, StageRun

    core = llm.llm_engine.engine_core.engine_core
    has_ranks = hasattr(core.scheduler, "dp_size")
    if core.vllm_config.parallel_config.pipeline_parallel_size > 1:
        return RankedStageRun if has_ranks else StageRun
    return RankedRun if has_ranks else EngineRun


def _one_line(error: BaseException) -> str:
    """The innermost cause, which ends the traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def run(spec: dict[str, Any], model: str) -> dict[str, Any]:
    """One run from start to end."""
    gc.collect()
    with (
        environment_of(spec.get("env", {})),
        simulated_hbm(spec.get("hbm_nbytes")),
        captured_log("vllm", "tpu_offload") as log,
    ):
        try:
            llm = _engine(spec, model)
        except Exception as e:
            error = _one_line(e)
            _clean_up()
            return {"error": error, "log": log}
        engine_run = _run_class(llm)(llm, model)
        outcome: dict[str, Any] = {"error": None}
        outcome["steps"] = [
            getattr(engine_run, step["do"])(**{k: v for k, v in step.items() if k != "do"}) for step in spec["steps"]
        ]
        outcome["end"] = engine_run.drain()
        left = engine_run.owned()
        engine_run.close()
        del engine_run, llm
        gc.collect()
        return outcome | {"freed": [ref() is None for ref in left], "log": log}


def _clean_up() -> None:
    """Cleans up after an engine that did not start; in production its process would end."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def _freezer() -> Callable[[], None]:
    """What has the garbage collector skip all objects of today.

    Between runs these are the million of vLLM, torch and jax, and what was traced: each engine collects four times, and
    visiting them took a quarter of a run. vLLM freezes as well, but together with the engine, and unfreezes all when it
    ends; here it does not.
    """
    freeze = gc.freeze
    gc.freeze = gc.unfreeze = lambda: None
    return freeze


def main() -> None:
    """Reads runs, writes outcomes."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of vLLM
    import cpu_shim
    import tiny_model

    cpu_shim.install()
    share_models()
    inspect_models_here()
    from tests.adapters.rank_runs import install_probes

    install_probes()
    # Killed when its tests have ended: what it leaves must be in their folder.
    with tempfile.TemporaryDirectory(dir=os.environ["HOME"]) as models:
        for name, config in MODELS.items():
            Path(models, name).mkdir()
            Path(models, name, "config.json").write_text(json.dumps(config))
        tiny_model.make(Path(models, "tiny"), num_layers=3)
        tiny_model.make(Path(models, "tiny, 7 layers"), num_layers=7)
        freeze = _freezer()
        for line in sys.stdin:
            try:
                spec = json.loads(line)
                outcome = run(spec, str(Path(models, spec.get("model", "qwen3"))))
            except Exception as e:
                logging.getLogger("vllm").exception("a run failed")
                outcome = {"error": f"in a step: {_one_line(e)}"}
                _clean_up()
            answers.write(json.dumps(outcome) + "\n")
            answers.flush()
            gc.collect()
            freeze()


if __name__ == "__main__":
    main()
