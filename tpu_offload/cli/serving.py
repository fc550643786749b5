"""Flags of the commands that serve a workload, and their report, which an interrupt only truncates."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tpu_offload.cli.files import output_file, write_json
from tpu_offload.cli.interrupts import stop_on_interrupt
from tpu_offload.cli.options import Decorator, FiniteFloat, input_file, number, option
from tpu_offload.engine import ModelConfig
from tpu_offload.measure import device_errors, environment
from tpu_offload.replay.setup import MODELS, ServingOptions

ENGINE_FLAGS = ("block_size", "max_num_batched_tokens", "num_spare_blocks", "async_scheduling")
MODEL_FLAGS = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
SOURCES = ("workload", "prompts", "trace")
"""Mutually exclusive parameters that name the workload."""

_KV_DTYPE = ModelConfig().kv_dtype


def serving_flags(defaults: Mapping[str, object]) -> Decorator:
    """Adds the flags of `serving_options` to a command.

    Args:
      defaults: defaults to show in the help, by flag name. A flag that is not given has the value None.
    """
    flags = (
        option("--workload", click.Choice(["chat", "decode"]), None, f"generated requests ({defaults['workload']})"),
        option("--prompts", input_file, "FILE", "JSON lines of chat messages"),
        option("--trace", input_file, "FILE", "JSON lines in the Mooncake format"),
        number("--requests", f"maximum number of requests ({defaults['requests']})"),
        number("--seed", "random seed (0)", low=0, high=2**32 - 1, default=0),
        number("--turns", f"chat: turns per conversation ({defaults['turns']})"),
        number("--max-tokens", "--prompts: tokens to generate per request (16)"),
        number("--tokens-per-block", "--trace: tokens per 512 tokens of the trace (16)", high=512),
        option("--temperature", FiniteFloat(), "T", "sample with a seed per request; 0 is greedy (0)", default=0.0),
        number("--top-k", "sample from the N most likely tokens; 0 is all (0)", low=0, default=0),
        number("--concurrency", f"requests in flight ({defaults['concurrency']})"),
        number("--num-blocks", f"HBM blocks ({defaults['num_blocks']})"),
        number("--block-size", f"tokens in a block ({defaults['block_size']})"),
        number("--max-num-batched-tokens", f"most tokens computed in a step ({defaults['max_num_batched_tokens']})"),
        number(
            "--num-spare-blocks",
            f"admission watermark: blocks kept free per running request ({defaults['num_spare_blocks']})",
            low=0,
        ),
        number(
            "--async-scheduling",
            f"1 dispatches a step before the previous step's tokens are read ({defaults['async_scheduling']})",
            low=0,
            high=1,
        ),
        number("--num-layers", f"model: layers ({defaults['num_layers']})"),
        number("--d-model", f"model: width ({defaults['d_model']})"),
        number("--num-heads", f"model: query heads ({defaults['num_heads']})"),
        number("--num-kv-heads", f"model: key and value heads ({defaults['num_kv_heads']})"),
        number("--head-dim", f"model: width of a head ({defaults['head_dim']})"),
        number("--d-ff", f"model: width of the feed-forward layer ({defaults['d_ff']})"),
        option(
            "--model",
            click.Choice(list(MODELS)),
            None,
            "model: full attention, or in 3 of 4 layers windows of 64 tokens (hybrid), states (state), or both (mixed)",
            default="full",
        ),
        option("--kv-dtype", str, "NAME", f"model: type of the KV cache ({_KV_DTYPE})", default=_KV_DTYPE),
        option("--json", output_file, "FILE", "write everything measured to FILE"),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for flag in reversed(flags):
            command = flag(command)
        return command

    return add


def serving_options(flags: Mapping[str, Any], *, engine: Mapping[str, int], model: ModelConfig) -> ServingOptions:
    """Builds `ServingOptions` from the flags of `serving_flags`.

    Args:
      flags: values of all flags except `json`.
      engine: defaults of `ENGINE_FLAGS`.
      model: defaults of the model's sizes.
    """
    own = (*ENGINE_FLAGS, *MODEL_FLAGS, "kv_dtype", "model")
    rest = {name: value for name, value in flags.items() if name not in own}
    sizes: dict[str, Any] = {name: engine[name] if flags[name] is None else flags[name] for name in ENGINE_FLAGS}
    given = {name: flags[name] for name in MODEL_FLAGS if flags[name] is not None}
    model = dataclasses.replace(model, **given, kv_dtype=flags["kv_dtype"], seed=flags["seed"])
    model = MODELS[flags["model"]](model)
    return ServingOptions(**rest, **sizes, model=model)


def make_report(compare: Callable[..., dict[str, Any]], path: Path | None, argv: Sequence[str]) -> dict[str, Any]:
    """Serves until the end or an interrupt, and writes the measurements to a file.

    Args:
      compare: serves and returns the report; it calls its keyword argument `stop` before each step.
      path: path of the JSON file; None writes none.
      argv: arguments of the command, for the report.
    """
    with stop_on_interrupt() as stop, device_errors(make_smaller="--num-blocks or the model"):
        report = compare(stop=stop)
        interrupted = stop()
    report |= {"interrupted": interrupted, "argv": list(argv), **environment()}
    if path is not None:
        write_json(path, report)
    return report
