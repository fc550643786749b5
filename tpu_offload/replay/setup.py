"""Builds the setup of a replay: workload, model and engine sizes.

All validation happens here, before the first engine is built.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.copy_profile import CopyProfile
from tpu_offload.engine import Engine, EngineConfig, Hosts, ModelConfig, SamplingParams
from tpu_offload.engine.kv_blocks import most_blocks
from tpu_offload.engine.runner import cache_layout, cache_shapes
from tpu_offload.engine.shards import check_shards
from tpu_offload.errors import InputError
from tpu_offload.layout import KVLayout
from tpu_offload.memory import available_nbytes
from tpu_offload.metrics import OffloadStats
from tpu_offload.replay.serving import ServedRun, serve
from tpu_offload.replay.timeline import Timeline
from tpu_offload.replay.workloads import (
    NUM_TOKENS,
    Workload,
    chat_workload,
    decode_workload,
    prompts_workload,
    trace_workload,
)

DEFAULT_NUM_CHAT_REQUESTS = 160
DEFAULT_NUM_DECODE_REQUESTS = 256
DEFAULT_NUM_TURNS = 10
_WINDOW = 64
_LAYERS_PER_FULL = 4


def hybrid(model: ModelConfig) -> ModelConfig:
    """A model with sliding windows in three of four layers.

    Raises:
      InputError: its layers cannot be divided so.
    """
    _check_layers(model, "hybrid", "with sliding windows")
    return dataclasses.replace(model, sliding_window=_WINDOW, window_layers=_all_but_every_fourth(model))


def state(model: ModelConfig) -> ModelConfig:
    """A model with linear-attention states in three of four layers, in heads of the same sizes.

    Raises:
      InputError: its layers cannot be divided so.
    """
    _check_layers(model, "state", "with states")
    layers = _all_but_every_fourth(model)
    return dataclasses.replace(
        model, state_layers=layers, num_state_heads=model.num_heads, state_head_dim=model.head_dim
    )


def mixed(model: ModelConfig) -> ModelConfig:
    """A model with states in two of four layers, and a sliding window in one.

    Raises:
      InputError: its layers cannot be divided so.
    """
    _check_layers(model, "mixed", "with states or a sliding window")
    with_states = state(model)
    windows = with_states.state_layers[2::3]  # before each layer with full attention
    states = tuple(i for i in with_states.state_layers if i not in windows)
    return dataclasses.replace(with_states, state_layers=states, sliding_window=_WINDOW, window_layers=windows)


def _check_layers(model: ModelConfig, name: str, kind: str) -> None:
    if model.num_layers % _LAYERS_PER_FULL:
        raise InputError(
            f"--model {name} with --num-layers {model.num_layers}; expected a multiple of {_LAYERS_PER_FULL}: one "
            f"layer with full attention after three {kind}"
        )


def _all_but_every_fourth(model: ModelConfig) -> tuple[int, ...]:
    return tuple(i for i in range(model.num_layers) if i % _LAYERS_PER_FULL != _LAYERS_PER_FULL - 1)


MODELS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "full": lambda model: model,
    "hybrid": hybrid,
    "state": state,
    "mixed": mixed,
}
"""What `--model` makes of the model's sizes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Workload and sizes; None is the command's default. The commands' `--help` describes each."""

    workload: str | None
    prompts: Path | None
    trace: Path | None
    requests: int | None
    seed: int
    turns: int | None
    max_tokens: int | None
    tokens_per_block: int | None
    temperature: float
    top_k: int
    concurrency: int | None
    num_blocks: int | None
    block_size: int
    max_num_batched_tokens: int
    num_spare_blocks: int
    async_scheduling: bool
    model: ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Everything that defines a run."""

    workload: Workload
    model: ModelConfig
    engine: EngineConfig
    offload: OffloadConfig
    concurrency: int
    sampling: Callable[[str, int], SamplingParams]


_TOKEN_NBYTES = 128  # host memory for a prompt token, in all lists that hold it


def blocks_per_request(workload: Workload, options: ServingOptions) -> int:
    """Most blocks that the longest request holds, of all layer groups."""
    return most_blocks(
        workload.longest_request,
        windows=options.model.group_windows,
        block_size=options.block_size,
        max_step_tokens=options.max_num_batched_tokens,
    )


def build_setup(
    options: ServingOptions, offload: OffloadConfig, *, workload: Workload, concurrency: int, num_blocks: int
) -> Setup:
    """Checks the sizes against each other, against memory and against the offload settings.

    Args:
      options: the other sizes.
      offload: settings of the library.
      workload: the workload.
      concurrency: number of requests in flight.
      num_blocks: size of HBM.
    Raises:
      InputError: HBM is too small for a request, or host memory is too small for HBM.
      ConfigError: two sizes contradict each other.
    """
    needed, longest = blocks_per_request(workload, options), workload.longest_request
    if num_blocks < needed:
        raise InputError(
            f"--num-blocks {num_blocks} is under the {needed} blocks of {options.block_size} tokens that the longest "
            f"request of {workload.name}, {longest} tokens, needs; set it to at least {needed}"
        )
    model = options.model
    assert model.vocab_size >= NUM_TOKENS
    engine = EngineConfig(
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_num_seqs=concurrency,
        max_model_len=longest,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_spare_blocks=options.num_spare_blocks,
        async_scheduling=options.async_scheduling,
    )
    check_memory(model, engine)
    layout = layout_of(model, engine)
    for size in (offload.staging_blocks, offload.host_chunks, offload.host_states):
        size(layout)  # fail on an invalid size now, not after the baseline
    if offload.enabled and offload.copy_profile and CopyPath.AUTO in (offload.save_path, offload.load_path):
        CopyProfile.read(offload.copy_profile).check_device(jax.devices()[0].device_kind)  # likewise

    def sampling(request_id: str, max_tokens: int) -> SamplingParams:
        seed = int.from_bytes(request_id.encode(), "big") * 2654435761 + options.seed
        return SamplingParams(
            max_tokens=max_tokens, temperature=options.temperature, top_k=options.top_k, seed=seed % 2**32
        )

    return Setup(workload, model, engine, offload, concurrency, sampling)


def build_workload(options: ServingOptions, *, default: str = "chat") -> Workload:
    """Builds the workload that the options select.

    Args:
      options: the options.
      default: name of the workload to generate if no option selects one.
    Raises:
      InputError: a flag belongs to another workload, or a file is invalid.
    """
    generated = options.prompts is None and options.trace is None
    name = options.workload or default
    for flag, value, source, wanted in (
        ("--turns", options.turns, generated and name == "chat", "--workload chat"),
        ("--max-tokens", options.max_tokens, options.prompts, "--prompts"),
        ("--tokens-per-block", options.tokens_per_block, options.trace, "--trace"),
    ):
        if value is not None and not source:
            raise InputError(f"{flag} {value} has no effect here; it requires {wanted}")
    if options.prompts is not None:
        return prompts_workload(
            options.prompts,
            num_requests=options.requests,
            max_tokens=options.max_tokens or 16,
            limit_tokens=max_request_tokens(options),
        )
    if options.trace is not None:
        return trace_workload(
            options.trace,
            num_requests=options.requests,
            tokens_per_block=options.tokens_per_block or 16,
            seed=options.seed,
            limit_tokens=max_request_tokens(options),
        )
    if name == "decode":
        return decode_workload(num_requests=options.requests or DEFAULT_NUM_DECODE_REQUESTS, seed=options.seed)
    return chat_workload(
        num_requests=options.requests or DEFAULT_NUM_CHAT_REQUESTS,
        turns=options.turns or DEFAULT_NUM_TURNS,
        seed=options.seed,
    )


def max_request_tokens(options: ServingOptions) -> int:
    """Most tokens that a request can have: HBM has room for its KV, and this process for its tokens."""
    model = options.model
    kv_nbytes = (model.num_layers - len(model.state_layers)) * _page_nbytes(model, 1)
    host_nbytes = available_nbytes()
    if jax.default_backend() == "cpu":
        num_tokens = host_nbytes // (kv_nbytes + _TOKEN_NBYTES)
    else:
        stats = jax.devices()[0].memory_stats() or {}
        num_tokens = min(int(stats.get("bytes_limit", 2**62)) // kv_nbytes, host_nbytes // _TOKEN_NBYTES)
    if options.num_blocks is not None:
        num_tokens = min(num_tokens, options.num_blocks * options.block_size)
    return max(1, num_tokens)


def _page_nbytes(model: ModelConfig, block_size: int) -> int:
    return math.prod(model.page_shape(block_size)) * 4 // model.kv_packing


def check_memory(model: ModelConfig, engine: EngineConfig) -> None:
    """Raises InputError on a CPU if the sizes need more memory than is free (the kernel would kill the process)."""
    if jax.default_backend() != "cpu":
        return
    kv_nbytes = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in cache_shapes(model, engine))
    layer = 2 * model.d_model * (model.num_heads + model.num_kv_heads) * model.head_dim + 3 * model.d_model * model.d_ff
    weight_nbytes = 4 * (model.num_layers * layer + 2 * model.vocab_size * model.d_model)
    activation_nbytes = 4 * engine.max_num_batched_tokens * (model.d_model + 2 * model.d_ff)
    free_nbytes = available_nbytes()
    needed_nbytes = kv_nbytes + weight_nbytes + activation_nbytes
    if needed_nbytes > free_nbytes:
        raise InputError(
            f"{engine.num_blocks} blocks of KV cache, the weights and a step take {needed_nbytes / 2**30:.1f} GB and "
            f"{free_nbytes / 2**30:.1f} GB of memory are free; lower --num-blocks or --max-num-batched-tokens, "
            "or use a smaller model"
        )


def layout_of(model: ModelConfig, engine: EngineConfig) -> KVLayout:
    """The layout of the engine's caches."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in cache_shapes(model, engine)]
    return cache_layout(model, engine, structs)


def host_sizes(setup: Setup, *, num_chunks: int, num_states: int) -> dict[str, Any]:
    """Settings for a host tier of so many chunks and, if the model has any, of so many states."""
    layout, offload = layout_of(setup.model, setup.engine), setup.offload
    if layout.state_group is None:
        return {"num_cpu_chunks": num_chunks}
    chunk_nbytes = layout.block_nbytes_per_host * offload.blocks_per_chunk
    kv_nbytes, state_nbytes = num_chunks * chunk_nbytes, num_states * layout.group_nbytes_per_host(layout.state_group)
    total_nbytes, share = kv_nbytes + state_nbytes, state_nbytes / (kv_nbytes + state_nbytes)
    if "state_share" in offload.model_fields_set:
        share = offload.state_share
        total_nbytes = math.ceil(max(kv_nbytes / (1 - share), state_nbytes / share))
    return {"num_cpu_chunks": total_nbytes // chunk_nbytes + 2, "state_share": share}


def start_hosts(model: ModelConfig, *, num_hosts: int, num_devices: int) -> Hosts:
    """Starts the processes that share a model, and this machine's memory.

    Args:
      model: the model.
      num_hosts: number of processes.
      num_devices: devices of each.
    Raises:
      InputError: the devices are not those of the CPU backend.
      ConfigError: the model cannot be divided among so many devices.
      HostError: a process does not start.
    """
    if jax.default_backend() != "cpu":
        raise InputError(f"--processes {num_hosts} on {jax.default_backend()}; expected JAX_PLATFORMS=cpu")
    check_shards(model, num_hosts * num_devices)
    return Hosts(num_hosts, num_devices, available_nbytes=available_nbytes() // num_hosts)


def describe(setup: Setup) -> dict[str, Any]:
    """The setup in the JSON file."""
    workload = setup.workload
    return {
        "workload": {
            "name": workload.name,
            "num_requests": workload.num_requests,
            "num_conversations": len(workload.conversations),
            "longest_request_tokens": workload.longest_request,
            "num_unique_blocks": workload.num_unique_blocks(setup.engine.block_size),
            "concurrency": setup.concurrency,
        },
        "model": dataclasses.asdict(setup.model),
        "engine": dataclasses.asdict(setup.engine),
        "config": setup.offload.model_dump(mode="json", exclude_none=True),
    }


def serve_once(
    setup: Setup,
    offload: OffloadConfig | None,
    *,
    on_finish: Callable[[], None],
    stop: Callable[[], bool],
    hosts: Hosts | None = None,
    on_end: Callable[[Engine], None] = lambda engine: None,
) -> tuple[ServedRun, OffloadStats | None]:
    """Serves the workload with a fresh engine, after compilation; serves nothing if `stop` is already True.

    Args:
      setup: workload and sizes.
      offload: settings that replace the setup's; None serves without the library.
      on_finish: called after each request.
      stop: called before each step; True ends the run.
      hosts: the processes that run the model; None runs it in this one.
      on_end: called with the engine before it is closed.
    Returns:
      The run, and the library's counters.
    """
    if stop():
        return ServedRun((), 0.0, complete=False), None
    engine = Engine(setup.model, setup.engine, offload=offload, clock=time.perf_counter, hosts=hosts)
    with contextlib.closing(engine):
        engine.warm_up()
        engine.wait_for_host_memory()
        timeline = Timeline(engine)
        run = serve(
            engine,
            setup.workload,
            concurrency=setup.concurrency,
            sampling=setup.sampling,
            on_finish=on_finish,
            stop=stop,
            on_step=timeline.sample,
        )
        run = dataclasses.replace(run, timeline=timeline.columns())
        on_end(engine)
        return run, engine.offload_stats()
