"""What does offloading cost and gain in a real `vllm serve`, compared with no connector and tpu-inference's own?

Each variant's server (API process and engine process, CPU stack) is started in every round, one at a time, warmed up,
and given the same workloads over HTTP. So every round starts with empty caches, and the variants are interleaved:

    cold      conversations whose blocks leave HBM between two turns
    warm      the same conversations again, from the first turn on
    unique    prompts that match nothing in any cache: what does saving cost?
    overload  more concurrent conversations than HBM holds: requests are preempted
    prefix    `vllm bench serve --dataset-name prefix_repetition` with more prefixes than HBM holds, blocks of 64
              tokens and 8-bit KV, the test of tpu-inference's maintainers scaled down; on a separate server

All answers are compared with those of a server with many blocks and no connector. Time to first token is that of later
turns (of all requests in `unique` and `prefix`). The baseline in the same run is `none`, which saves nothing and
computes everything. Ctrl-C ends it and reports what has been measured.

  .venv-vllm/bin/python benchmarks/bench_serve.py --rounds 5 --json serve.json
  .venv-vllm/bin/python benchmarks/bench_serve.py --variants none ours --workloads unique

Needs the environment that `scripts/vllm_cpu/setup.sh` makes. "HBM" is host memory there: compare variants
with each other, not with a TPU. Other processes on the machine affect the figures, the server's CPU seconds the least:
all its work is done on the CPU, so they compare variants where the time on the clock is too noisy.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Spread, count, in_turn, make_parser, print_table, write_json
from vllm_common import MODULES, figure_rows, spread

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.vllm_cpu.vllm_client import Client, Load, Turn
from scripts.vllm_cpu.vllm_server import MODEL, OURS, Folder, Server, ServerError
from tpu_offload.cli.command import run_process

TALKS = ("cold", "warm", "unique", "overload")
WORKLOADS = (*TALKS, "prefix")
ENOUGH_BLOCKS = 600
WARM_UP = Load(conversations=6, turns=2, concurrency=6, first=200, answer=20)
NO_ASYNC = ("--no-async-scheduling",)
_CLIENT_LIMIT_S = 900

type Connector = dict[str, Any]
type Found = dict[str, dict[str, Any]]
"""Figures by workload."""


def ours(policy: str = "recompute", **extra: Any) -> Connector:
    settings = OURS["kv_connector_extra_config"] | extra
    return {**OURS, "kv_load_failure_policy": policy, "kv_connector_extra_config": settings}


PEER: Connector = {
    "kv_connector": "TPUOffloadConnector",
    "kv_connector_module_path": MODULES["peer"],
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
VARIANTS: dict[str, tuple[Connector | None, tuple[str, ...]]] = {
    "none": (None, ()),
    "peer": (PEER, ()),
    "ours": (ours(), ()),
    "ours-fail": (ours("fail"), ()),
    "ours-no-async": (ours(), NO_ASYNC),
    "ours-async-load": (ours(sync_load=False), ()),
    "ours-no-decode-save": (ours(decode_save=False), ()),
    "ours-staged": (ours(save_path="staged", load_path="staged"), ()),
    "none-no-async": (None, NO_ASYNC),
    "peer-no-async": (PEER, NO_ASYNC),
}
"""Connector and arguments; `ours` is the configuration of docs/vllm.md, with generated tokens saved."""
DEFAULT_VARIANTS = ("none", "peer", "ours", "ours-fail", "ours-no-async")
ROWS = tuple(
    (workload, name, text)
    for workload in WORKLOADS
    for name, text in (
        ("seconds", "seconds"),
        ("tokens_per_s", "generated tokens/s"),
        ("ttft_ms_p50", "time to first token, median (ms)"),
        ("ttft_ms_p90", "time to first token, p90 (ms)"),
        ("cpu_s", "CPU seconds of the server"),
        ("preemptions", "preemptions"),
        ("cached_tokens", "prompt tokens found"),
        ("computed_tokens", "prompt tokens computed"),
        ("differing", "answers that differ from the reference"),
    )
)


def start(
    folder: Folder, variant: str | None, args: argparse.Namespace, *, num_blocks: int, arguments: Sequence[str] = ()
) -> Server:
    """A ready server of a variant, or of the reference (None)."""
    connector, own = VARIANTS[variant] if variant else VARIANTS["none"]
    if connector is not None and "kv_connector_extra_config" in connector:
        extra = connector["kv_connector_extra_config"] | {"num_cpu_chunks": args.host_blocks}
        connector = connector | {"kv_connector_extra_config": extra}
    peers = {"NUM_CPU_CHUNKS": args.host_blocks, "NUM_STAGING_BLOCKS": args.staging_blocks, "DECODE_SAVE": 1}
    environ = {f"TPU_OFFLOAD_{name}": str(value) for name, value in peers.items()} if connector is PEER else {}
    server = Server(
        folder, num_blocks=num_blocks, connector=connector, arguments=[*own, *arguments], environ=environ
    )  # fmt: skip
    try:
        server.wait_until_ready()
    except BaseException:
        server.kill()
        raise
    return server


def loads(args: argparse.Namespace) -> dict[str, tuple[Load, int]]:
    chat = Load(conversations=args.conversations, turns=args.turns, concurrency=args.concurrency)
    return {
        "cold": (chat, 1),
        "warm": (chat, 1),
        "unique": (Load(conversations=args.prompts, turns=1, concurrency=args.concurrency, first=240), 2),
        "overload": (Load(conversations=args.overload, turns=3, concurrency=args.overload, answer=40), 3),
    }


async def talk(server: Server, load: Load, seed: int) -> tuple[list[Turn], float]:
    async with Client(server.url) as client:
        started_s = time.perf_counter()
        turns = await client.converse(load, seed=seed)
        return turns, time.perf_counter() - started_s


def warm_up(server: Server) -> None:
    """Makes the server compile its programs: prompts that match nothing, partly, and wholly."""
    for _ in range(2):
        asyncio.run(talk(server, WARM_UP, 99))


def measure_talk(server: Server, load: Load, seed: int) -> dict[str, Any]:
    before = server.metrics()["vllm:num_preemptions_total"]
    before_s = server.cpu_s()
    turns, seconds = asyncio.run(talk(server, load, seed))
    cpu_s = server.cpu_s() - before_s
    first_ms = Spread.of((turn.answer.first_s for turn in turns if turn.turn or load.turns == 1), scale=1e3)
    cached = sum(turn.answer.cached_tokens for turn in turns)
    return {
        "seconds": seconds,
        "tokens_per_s": sum(len(turn.answer.tokens) for turn in turns) / seconds,
        "ttft_ms_p50": first_ms.median,
        "ttft_ms_p90": first_ms.p90,
        "cpu_s": cpu_s,
        "preemptions": server.metrics()["vllm:num_preemptions_total"] - before,
        "cached_tokens": cached,
        "computed_tokens": sum(turn.answer.prompt_tokens for turn in turns) - cached,
        "answers": [turn.answer.tokens for turn in turns],
    }


def talk_round(folder: Folder, variant: str | None, args: argparse.Namespace, num_blocks: int) -> Found:
    """One round of the conversations on a new server."""
    with start(folder, variant, args, num_blocks=num_blocks) as server:
        warm_up(server)
        return {
            workload: measure_talk(server, *loads(args)[workload])
            for workload in TALKS
            if workload in args.workloads or (workload == "cold" and "warm" in args.workloads)
        }


def prefix_round(folder: Folder, variant: str | None, args: argparse.Namespace, num_blocks: int) -> Found:
    """One round of vLLM's own client on a new server."""
    arguments = ["--block-size", "64", "--kv-cache-dtype", "fp8"]
    with start(folder, variant, args, num_blocks=num_blocks, arguments=arguments) as server:
        warm_up(server)
        run_prefix_client(folder, server, args, seed=98, prompts=args.prefixes)
        before, before_s = server.metrics(), server.cpu_s()
        found = run_prefix_client(folder, server, args, seed=1, prompts=args.prefixes * args.prompts_per_prefix)
        after, cpu_s = server.metrics(), server.cpu_s() - before_s
    cached, asked = (
        after[f"vllm:prompt_tokens{name}_total"] - before[f"vllm:prompt_tokens{name}_total"] for name in ("_cached", "")
    )
    return {
        "prefix": {
            "seconds": found["duration"],
            "tokens_per_s": found["output_throughput"],
            "ttft_ms_p50": found["median_ttft_ms"],
            "ttft_ms_p90": found["p90_ttft_ms"],
            "cpu_s": cpu_s,
            "preemptions": after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"],
            "cached_tokens": cached,
            "computed_tokens": asked - cached,
            "answers": found["generated_texts"],
        }
    }


def run_prefix_client(
    folder: Folder, server: Server, args: argparse.Namespace, *, seed: int, prompts: int
) -> dict[str, Any]:
    path = folder.path / "prefix.json"
    path.unlink(missing_ok=True)
    settings = {
        "--backend": "openai", "--endpoint": "/v1/completions", "--host": "127.0.0.1", "--port": server.port,
        "--model": MODEL, "--tokenizer": folder.model, "--dataset-name": "prefix_repetition", "--num-prompts": prompts,
        "--prefix-repetition-num-prefixes": args.prefixes, "--prefix-repetition-prefix-len": args.prefix_tokens,
        "--prefix-repetition-suffix-len": args.suffix_tokens, "--prefix-repetition-output-len": args.prefix_answer,
        "--max-concurrency": args.concurrency, "--seed": seed, "--metric-percentiles": "90",
        "--result-dir": path.parent, "--result-filename": path.name, "--temperature": 0,
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--ignore-eos"]
    command += ["--save-result", "--save-detailed", "--disable-tqdm"]
    command += [str(part) for item in settings.items() for part in item]
    done = subprocess.run(
        command, cwd=folder.path, env=server.environ, capture_output=True, text=True, timeout=_CLIENT_LIMIT_S,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode or not path.is_file():
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\nvllm bench serve ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def measure(args: argparse.Namespace, variants: list[str], report: dict[str, Any]) -> None:
    """Adds rounds to the report; may be interrupted at any point."""
    groups = []
    if set(args.workloads) & set(TALKS):
        groups.append((talk_round, args.hbm_blocks))
    if "prefix" in args.workloads:
        groups.append((prefix_round, args.prefix_hbm_blocks))
    with Folder() as folder:
        right: dict[str, Any] = {}
        for measure_round, _ in groups:
            found = measure_round(folder, None, args, ENOUGH_BLOCKS)
            right |= {workload: one["answers"] for workload, one in found.items()}
        print("the reference run is done", flush=True)
        for number in range(args.rounds):
            for variant in in_turn(variants, number):
                if variant in report["refused"]:
                    continue
                parts: Found = {}
                for measure_round, num_blocks in groups:
                    try:
                        parts |= measure_round(folder, variant, args, num_blocks)
                    except ServerError as e:
                        report["refused"][variant] = str(e)
                        print(f"{variant} is skipped: {e}", file=sys.stderr, flush=True)
                        break
                for workload, one in parts.items():
                    one["differing"] = sum(a != b for a, b in zip(one.pop("answers"), right[workload], strict=True))
                if variant not in report["refused"]:
                    report["rounds"][variant].append(parts)
                    print(f"round {number + 1} of {args.rounds}: {variant}", flush=True)


def figures_of(rounds: list[Found]) -> dict[str, dict[str, Spread | None]]:
    """Median and range over the rounds of one variant, by workload and figure."""
    return {
        workload: {
            name: spread(one[workload].get(name) for one in rounds if workload in one)
            for part, name, _ in ROWS
            if part == workload
        }
        for workload in WORKLOADS
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--variants", nargs="+", choices=[*VARIANTS, "all"], default=list(DEFAULT_VARIANTS))
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--rounds", type=count, default=5, help="rounds of each variant")
    add("--quick", action="store_true", help="minimal sizes, to check that it runs")
    sizes = parser.add_argument_group("server").add_argument
    sizes("--hbm-blocks", type=count, default=80, help="of 16 tokens")
    sizes("--prefix-hbm-blocks", type=count, default=30, help="of 64 tokens, in `prefix`")
    sizes("--host-blocks", type=count, default=4096)
    sizes("--staging-blocks", type=count, default=128, help="of tpu-inference's connector")
    load = parser.add_argument_group("workloads").add_argument
    load("--concurrency", type=count, default=4, help="requests at a time, but in `overload`")
    load("--conversations", type=count, default=12)
    load("--turns", type=count, default=6)
    load("--prompts", type=count, default=60, help="in `unique`")
    load("--overload", type=count, default=16, help="conversations at a time in `overload`")
    load("--prefixes", type=count, default=10)
    load("--prompts-per-prefix", type=count, default=4)
    load("--prefix-tokens", type=count, default=512)
    load("--suffix-tokens", type=count, default=64)
    load("--prefix-answer", type=count, default=16)
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.conversations, args.turns, args.prompts, args.overload = 1, 8, 2, 4, 8
        args.hbm_blocks = 66  # vLLM requires room for the longest request (1,024 tokens) and one extra block
        args.prefixes, args.prompts_per_prefix, args.prefix_tokens, args.prefix_hbm_blocks = 6, 2, 256, 18
    if "all" in args.variants:
        args.variants = list(VARIANTS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    variants = list(dict.fromkeys(args.variants))
    report: dict[str, Any] = {"refused": {}, "rounds": {variant: [] for variant in variants}, "interrupted": False}
    try:
        measure(args, variants, report)
    except KeyboardInterrupt:
        report["interrupted"] = True
    measured = {variant: rounds for variant, rounds in report["rounds"].items() if rounds}
    figures = {variant: figures_of(rounds) for variant, rounds in measured.items()}
    if measured:
        title = f"vllm serve: median (min-max) of {max(map(len, measured.values()))} rounds"
        print_table(title, ["part", "", *figures], figure_rows(ROWS, list(figures.values())), num_labels=2)
    for variant in report["refused"]:
        print(f"{variant} is skipped: {report['refused'][variant].splitlines()[0]}")
    if measured:
        write_json(args, question="what offloading costs and gains in a real vllm serve", figures=figures, **report)
    if report["interrupted"]:
        print("interrupted: the results cover what was measured until then", file=sys.stderr)
    return 130 if report["interrupted"] else 0


if __name__ == "__main__":
    run_process(main)
