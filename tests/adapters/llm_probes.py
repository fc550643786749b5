"""Hooks of `llm_runs`: what they observe in an engine, and what they change in it."""

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import signal
from typing import Any

from tests.inside.worker import arena_segments, tier_groups, worker_storage_tier

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def die_with_parent() -> None:
    """Has Linux kill this process, and those that it forks from now on, when their parents end in whatever way.

    vLLM's schedulers of data-parallel ranks are forked processes that would wait for the next command for ever.
    """
    _kill_with_parent()
    os.register_at_fork(after_in_child=_kill_with_parent)


def _kill_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def count_calls(owner: Any, name: str) -> list[None]:
    """A list with an entry for each call. It must not refer to `EngineRun`, or the engine would never be collected."""
    calls: list[None] = []
    method = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    setattr(owner, name, count)
    return calls


class FedTokens:
    """Compares every token that the model was given with those that vLLM has hashed.

    KV is saved under hashes of tokens; the KV of a position is that of the last token that the model was given there.
    Like `count_calls`, this must not refer to `EngineRun`; nor do the engine's objects outlive the engine in it.
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


def shuffle_host_memory(worker: Any, group: int | None = None) -> None:
    """Moves the contents of every block in the host pool, of a page group or of all, to the next one."""
    groups = tier_groups(worker)
    for copies in groups if group is None else [groups[group]]:
        pool = copies.memory.arena
        pool.wait_until_allocated()
        for i, segment in enumerate(arena_segments(pool)):
            pool.replace(i, [_rolled(part) for part in segment])


def _rolled(part: Any) -> Any:
    """Moves the rows on each device of this process to the next place."""
    import jax
    import numpy as np

    shards = [
        jax.device_put(np.roll(np.asarray(shard.data), 1, axis=0), shard.data.sharding)
        for shard in part.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(part.shape, part.sharding, shards)


def break_loads(worker: Any, times: int, method: str = "load", group: int = 0) -> None:
    """Has the next loads fail, in this method of the copier of a page group."""
    from tpu_offload.types import Direction

    copier, left = tier_groups(worker)[group].copiers[Direction.LOAD], [times]
    load = getattr(copier, method)

    def fail(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("made to fail")
        return load(*args)

    setattr(copier, method, fail)


def lose_caches(worker: Any, skip: list[int], method: str = "load", group: int = 0) -> None:
    """Has loads of a page group destroy the KV caches: one after each of these numbers of other loads."""
    from tpu_offload.types import Direction

    copier, left = tier_groups(worker)[group].copiers[Direction.LOAD], list(skip)
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


def break_reads(worker: Any, times: int) -> None:
    """Has the next reads of the nearest storage tier fail."""
    tier: Any = worker_storage_tier(worker)
    numbers = itertools.count()
    read = tier.read

    def fail(*args: Any) -> None:
        if next(numbers) < times:  # several threads read
            raise OSError("made to fail")
        read(*args)

    tier.read = fail


class EventRecorder:
    """Records events in place of vLLM's publisher."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def publish(self, batch: Any) -> None:
        self._batches.append(batch)

    def shutdown(self) -> None:
        pass


@contextlib.contextmanager
def captured_log(*names: str) -> Any:
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
def environment_of(settings: dict[str, str]) -> Any:
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
def simulated_hbm(nbytes: int | None) -> Any:
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


def share_models() -> None:
    """Engines of one model share its jitted functions, so that these are traced and lowered once a process.

    tpu-inference makes them anew for each engine. Weights, KV caches and everything else are an engine's own.
    """
    import jax
    from tpu_inference.runner import tpu_runner

    load, loaded = tpu_runner.get_model, {}

    def get_model(vllm_config: Any, rng: Any, mesh: Any, *args: Any, **kwargs: Any) -> Any:
        layers = vllm_config.compilation_config.static_forward_context
        # All that the traced functions depend on; the hash covers the model's own settings, max_model_len among them.
        # That of the whole `vllm_config` also differs with settings that they do not depend on.
        caches = vllm_config.cache_config
        key = (
            vllm_config.model_config.compute_hash(), str(caches.cache_dtype), caches.block_size,
            caches.mamba_cache_mode, mesh, str(vllm_config.speculative_config), args, str(kwargs),
        )  # fmt: skip
        if key not in loaded:
            model = load(vllm_config, rng, mesh, *args, **kwargs)
            loaded[key] = model, vllm_config.quant_config, dict(layers)
        model, vllm_config.quant_config, known_layers = loaded[key]
        layers.update(known_layers)  # attention layers of a PyTorch model, of which the KV cache is planned
        return model

    tpu_runner.get_model = get_model
    # tpu-inference calls it when an engine has loaded its weights, to free the programs that loading has compiled. It
    # would drop those of the shared functions, too.
    jax.clear_caches = lambda: None


def inspect_models_here() -> None:
    """vLLM looks at a model's class in another process, which imports vLLM again: ten seconds for each model."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def set_random_weights(runner: Any) -> None:
    """Sets random weights with which the next token depends on all tokens before it.

    With vLLM's dummy weights it depends on the last token alone, so no test would detect a wrong KV cache.
    """
    import jax

    leaves, tree = jax.tree_util.tree_flatten_with_path(runner.state)
    is_torch = isinstance(runner.state, dict)
    # A small residual, so that attention has an effect. Gemma multiplies embeddings by the root of their length, 16.
    embedding = 0.5 / 16 if runner.model_config.hf_config.model_type.startswith("gemma") else 0.5
    weights = []
    for index, (path, leaf) in enumerate(leaves):
        name, neutral = jax.tree_util.keystr(path), 1.0
        if is_torch and leaf.ndim == 1:
            neutral = float(leaf[0])  # 0 for a norm that adds 1
        is_latent = ".W_UK_T" in name or ".W_UV" in name
        scale = embedding if "embed" in name else 0.5 if "conv1d" in name or is_latent else 1 / 16
        is_weight = not is_torch or is_latent or name.endswith((".weight']", ".A_log']"))
        weight = _weight(index, name, leaf.shape, leaf.dtype, scale, neutral) if is_weight else leaf
        weights.append(jax.device_put(weight, leaf.sharding))
    runner.state = jax.tree_util.tree_unflatten(tree, weights)
    runner.refresh_state_leaves()


@functools.cache
def _weight(index: int, name: str, shape: tuple[int, ...], dtype: Any, scale: float, neutral: float) -> Any:
    import jax
    import numpy as np

    if name.endswith(".A_log']"):
        return np.full(shape, -4.0, dtype)  # a state that lasts for tens of tokens
    if name.endswith("_scale']"):  # of the projections of latents; on CPUs tpu-inference computes 0
        return np.ones(shape, dtype)
    if len(shape) == 1:
        return np.full(shape, neutral + ("q_norm" in name or "k_norm" in name), dtype)
    return np.asarray(scale * jax.random.normal(jax.random.key(index), shape, dtype))
