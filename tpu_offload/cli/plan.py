"""`tpu-offload plan`: what a model needs on a TPU machine, what offloading gains there, and the command to serve it."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tpu_offload.cli.files import check_outputs, output_file, write_file, write_json
from tpu_offload.cli.html.flag import check_html, html_flag
from tpu_offload.cli.options import Command, FiniteFloat, MultiValue, input_file, number, option
from tpu_offload.errors import InputError
from tpu_offload.plan import (
    WEIGHTS,
    PlanOptions,
    advice,
    built_in_models,
    expected_hits,
    find_machine,
    find_model,
    make_plan,
)

_KV_NBYTES = {"bfloat16": 2, "fp8": 1}
_DOES_NOT_FIT = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The flags."""

    model: str
    machine: str
    tensor_parallel: int | None
    attention_ranks: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    weights: str | None
    kv_dtype: str
    gpu_memory_utilization: float
    decode_save: bool
    trace: tuple[tuple[Path, ...], ...]
    trace_block_tokens: int
    json: Path | None
    html: Path | None

    def plan_options(self) -> PlanOptions:
        """The flags, for the planner."""
        return PlanOptions(
            num_devices=self.tensor_parallel,
            num_ranks=self.attention_ranks,
            max_tokens=self.max_model_len,
            max_requests=self.max_num_seqs,
            step_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            kv_nbytes=_KV_NBYTES[self.kv_dtype],
            hbm_share=self.gpu_memory_utilization,
        )


@click.command(cls=Command)
@option(
    "--model",
    str,
    "NAME|FILE",
    f"a config.json, or one of {', '.join(built_in_models())}",
    required=True,
)
@option(
    "--machine", str, "NAME", "a TPU slice: v5e-8, v5p-8, v6e-8, tpu7x-8, v6e-16 (several hosts), ...", required=True
)
@number("--tensor-parallel", "devices that serve the model (all of the machine)")
@number("--attention-ranks", "data-parallel ranks of the attention (with latent attention one a device, else 1)")
@number("--max-model-len", "longest context in tokens (what the model was made for)", high=10_000_000)
@number("--max-num-seqs", "most requests at a time (256)", default=256, high=65_536)
@number("--max-num-batched-tokens", "most tokens of a step (1024)", default=1024, high=1_000_000)
@number("--block-size", "tokens of a KV block (tpu-inference's choice)", high=65_536)
@option("--weights", click.Choice(WEIGHTS), None, "precision of the weights (what the config.json says)")
@option("--kv-dtype", click.Choice(tuple(_KV_NBYTES)), None, "type of the KV cache (bfloat16)", default="bfloat16")
@option(
    "--gpu-memory-utilization",
    FiniteFloat(0.01, 1.0),
    "SHARE",
    "part of the HBM that vLLM takes for weights and KV (0.9)",
    default=0.9,
)
@option("--decode-save", bool, None, "also save generated tokens: for conversations", is_flag=True)
@option(
    "--trace",
    MultiValue(input_file),
    "FILE...",
    "JSON lines in the Mooncake format: the hit rate that these requests would have",
    multiple=True,
)
@number("--trace-block-tokens", "tokens per id of the trace (512)", default=512)
@option("--json", output_file, "FILE", "write the figures as JSON")
@html_flag()
@click.pass_obj
def command(argv: Sequence[str], /, **flags: Any) -> int:
    """What a model needs on a TPU machine, what offloading gains there, and the command that serves it.

    Arithmetic, without a device. Status 1 if the model does not fit, with the nearest thing that does.
    """
    from tpu_offload.cli.plan_report import as_json, plan_tables, print_plan

    options = _Options(**flags)
    traces = [path for paths in options.trace for path in paths]
    model = Path(options.model)
    read = {f"the trace {path}": path for path in traces}
    read |= {"the model's config.json": model / "config.json" if os.path.isdir(model) else model}
    check_outputs(read, json=options.json, html=options.html)
    check_html(options.html)
    if options.block_size is not None and options.block_size & (options.block_size - 1):
        raise InputError(f"--block-size {options.block_size}; expected a power of two, as tpu-inference needs")
    machine = find_machine(options.machine)
    plan = make_plan(find_model(options.model, weights=options.weights), machine, options.plan_options())
    hits = None
    if traces and plan.caches is not None:
        hits = expected_hits(plan, traces, block_tokens=options.trace_block_tokens)
    report = {"argv": list(argv), **as_json(plan, hits, decode_save=options.decode_save)}
    tables = plan_tables(plan, hits)
    print_plan(plan, tables, report)
    if options.json is not None:
        write_json(options.json, report)
    if options.html is not None:
        from tpu_offload.cli.html.plan import plan_page

        write_file(options.html, plan_page(report, tables, advice(plan)).render())
    return 0 if plan.caches is not None else _DOES_NOT_FIT
