"""Shared by the vLLM benchmarks: connectors, figures, and messages between bench_vllm.py and its children."""

import argparse
import atexit
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from common import Spread

SHIM = Path(__file__).parents[1] / "scripts" / "vllm_cpu"
OURS = {
    "async": {"sync_load": False},
    "sync": {"sync_load": True},
    "staged": {"save_path": "staged", "load_path": "staged"},
}
MODULES = {"peer": "tpu_inference.offload.tpu_offload_connector", "ours": "tpu_offload.adapters.vllm"}
EOS = 2

type Figures = Mapping[str, Mapping[str, Spread | None]]
"""Figures of one variant, by part and name; None if not measured."""


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are not None."""
    some = [value for value in values if value is not None]
    return Spread.of(some) if some else None


def figure_rows(rows: Iterable[tuple[str, str, str]], figures: Sequence[Figures]) -> Iterator[list[str] | None]:
    """Table rows from (part, name, text) with a column per variant; rows without any figure are omitted."""
    last = None
    for part, name, text in rows:
        cells = [one[part].get(name) for one in figures]
        if not any(cells):
            continue
        if last is not None and part != last:
            yield None
        yield ["" if part == last else part, text, *map(_cell, cells)]
        last = part


def _cell(one: Spread | None) -> str:
    if one is None:
        return "-"
    digits = 0 if one.median >= 1000 else 1
    low, middle, high = (f"{value:.{digits}f}".removesuffix(".0") for value in (one.min, one.median, one.max))
    return middle if low == high else f"{middle} ({low}-{high})"


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """The children's environment: the same sizes for both connectors."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TPU_OFFLOAD_")}
    environ |= {
        "JAX_PLATFORMS": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_OFFLOAD_NUM_CPU_CHUNKS": str(args.host_blocks),
        "TPU_OFFLOAD_NUM_STAGING_BLOCKS": str(args.staging_blocks),
        "TPU_OFFLOAD_SKIP_JAX_PRECOMPILE": "0",
    }
    paths = [str(SHIM / "stubs"), str(SHIM), str(SHIM.parents[1]), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environ.pop("VLLM_TARGET_DEVICE", None)  # it would deselect tpu-inference's platform
    return environ


def model_dir(args: argparse.Namespace) -> str:
    """A folder with a model configuration and no weights, until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-qwen3-")
    atexit.register(folder.cleanup)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": args.hidden,
        "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers, "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads, "head_dim": 128, "vocab_size": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 1 << 15, "torch_dtype": args.dtype, "bos_token_id": 1,
        "eos_token_id": EOS, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "use_sliding_window": False, "max_window_layers": args.layers,
    }  # fmt: skip
    Path(folder.name, "config.json").write_text(json.dumps(config))
    return folder.name


def transfer_config(variant: str) -> Any:
    """vLLM's `kv_transfer_config` for `none`, `peer` or `ours-...`; None without a connector."""
    from vllm.config import KVTransferConfig

    who, _, which = variant.partition("-")
    if who not in MODULES:
        return None
    return KVTransferConfig(
        kv_connector="TPUOffloadConnector",
        kv_role="kv_both",
        kv_connector_module_path=MODULES[who],
        kv_connector_extra_config=OURS.get(which, {}),
        kv_load_failure_policy="recompute",
    )


class StepTimer:
    """CPU seconds of this thread inside a scheduler's `schedule` and `update_from_output`, per step.

    Neither waits, and wall-clock time would include other processes.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduled: list[float] = []
        self.updated: list[float] = []
        scheduler.schedule = self._timed(scheduler.schedule, self.scheduled)
        scheduler.update_from_output = self._timed(scheduler.update_from_output, self.updated)

    def reset(self) -> None:
        self.scheduled.clear()
        self.updated.clear()

    def steps(self) -> list[float]:
        """Seconds of each finished step."""
        return [a + b for a, b in zip(self.scheduled, self.updated, strict=False)]

    def _timed(self, call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
        clock = time.thread_time

        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = clock()
            try:
                return call(*args, **kwargs)
            finally:
                spent.append(clock() - started_s)

        return timed


class Measured(Protocol):
    """The interface of a child."""

    def start(self) -> dict[str, Any]:
        """Prepares everything; returns the environment."""

    def measure(self, *, variant: str, seed: int) -> dict[str, Any]:
        """One round."""


def serve_parent(child: Measured) -> None:
    """A child's main loop: one JSON line in, one out. Output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = child.start()
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # tpu-inference's clean-up at exit raises on JAX models
        answer = child.measure(**json.loads(line))
