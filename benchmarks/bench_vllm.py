"""What does offloading cost and gain in vLLM on TPU, compared with tpu-inference's own connector?

Serves the same conversations with vLLM and tpu-inference without a connector (`none`), with tpu-inference's (`peer`),
and with several configurations of ours (`--ours`). Each variant has its own process, started once and warmed up until a
round compiles nothing; then the variants measure rounds in turn. All must generate the same tokens. `vllm_engine.py`
defines a round. Then the same with vLLM's scheduler alone (`vllm_scheduler.py`), all variants in one process. The
baseline in the same run is `none`, which computes everything.

  .venv-vllm/bin/python benchmarks/bench_vllm.py --repeats 7 --json vllm.json
  .venv-vllm/bin/python benchmarks/bench_vllm.py --part scheduler --ours async

Needs the environment that `scripts/vllm_cpu/setup.sh` makes. "HBM" is host memory there, so copy times say nothing
about a TPU; the scheduler's times and the numbers of steps do.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Spread, count, in_turn, make_parser, print_table, write_json
from vllm_common import OURS, environment_of, figure_rows, spread

HERE = Path(__file__).parent

type Rounds = list[dict[str, Any]]


class Child:
    """A child process with one or more variants."""

    def __init__(self, script: str, variants: list[str], args: argparse.Namespace, environ: dict[str, str]) -> None:
        self._variants = variants
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as this object exists)
        settings = vars(args) | {"variants": variants, "json": None}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environ,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-40:])
            names = ", ".join(self._variants)
            sys.exit(f"{tail}\n{names} ended with status {self._process.returncode}; its last lines are above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def start_engines(variants: list[str], args: argparse.Namespace) -> list[Child]:
    """Starts one process per variant."""
    environ = environment_of(args)
    return [Child("vllm_engine.py", [variant], args, environ) for variant in variants]


def start_schedulers(variants: list[str], args: argparse.Namespace) -> list[Child]:
    """Starts one process for all variants: it takes long to start, and only one variant runs at a time."""
    sizes = {"host_blocks": args.scheduler_host_blocks, "staging_blocks": args.scheduler_staging_blocks}
    args = argparse.Namespace(**vars(args) | sizes)
    environ = environment_of(args) | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": str(HERE.parent)}
    return [Child("vllm_scheduler.py", variants, args, environ)] * len(variants)


def run(
    children: Sequence[Child], variants: list[str], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Rounds]]:
    """Runs rounds of all variants in turn; returns the children's environments and the answers of each variant."""
    by_variant = dict(zip(variants, children, strict=True))
    try:
        up = {child: child.answer() for child in dict.fromkeys(children)}
        print(f"{', '.join(variants)}: up", flush=True)
        for variant, child in by_variant.items():
            for i in range(args.max_warm_ups):
                answer = child.ask(variant=variant, seed=100 + i)
                if not answer.get("compiles"):
                    break
            print(f"{variant} is warm after {i + 1} rounds", flush=True)
        rounds: dict[str, Rounds] = {variant: [] for variant in variants}
        for repeat in range(args.repeats):
            for variant in in_turn(variants, repeat):
                rounds[variant].append(by_variant[variant].ask(variant=variant, seed=repeat))
            print(f"round {repeat + 1} of {args.repeats}", flush=True)
        return {variant: up[child] for variant, child in by_variant.items()}, rounds
    finally:
        for child in children:
            child.close()


def check_tokens(rounds: dict[str, Rounds]) -> None:
    """Exits unless every request that finished in two variants has the same tokens in both."""
    reference, *others = rounds
    for variant in others:
        for repeat, (ours, theirs) in enumerate(zip(rounds[variant], rounds[reference], strict=True)):
            for name in sorted(set(ours["tokens"]) & set(theirs["tokens"])):
                if ours["tokens"][name] != theirs["tokens"][name]:
                    sys.exit(
                        f"WRONG TOKENS: round {repeat}, request {name}: {variant} has {ours['tokens'][name]}, "
                        f"{reference} has {theirs['tokens'][name]}"
                    )
            missing = set(theirs["tokens"]) ^ set(ours["tokens"])
            if any("-other-" not in name for name in missing):
                sys.exit(f"WRONG REQUESTS: round {repeat}: {variant} and {reference} differ in {sorted(missing)}")


def over_rounds(name: str, values: Rounds, key: str, *, scale: float = 1) -> dict[str, Spread | None]:
    """Spreads over the rounds of the median and the 90th percentile of a list in each round."""
    each = [Spread.of(one[key], scale=scale) for one in values if one[key]]
    return {f"{name}_p50": spread(one.median for one in each), f"{name}_p90": spread(one.p90 for one in each)}


def engine_figures(rounds: Rounds) -> dict[str, Any]:
    """A variant's figures: spreads over the rounds of a round's median, percentile or sum."""
    figures: dict[str, Any] = {}
    plain = ("wall_s", "num_steps", "num_empty_steps", "prompt_tokens", "hbm_tokens", "loaded_tokens",
             "computed_tokens")  # fmt: skip
    for part in ("serve", "idle", "busy"):
        parts = [one["parts"][part] for one in rounds]
        figures[part] = {
            **over_rounds("scheduler_us", parts, "scheduler_s", scale=1e6),
            "scheduler_ms_total": spread(1e3 * sum(p["scheduler_s"]) for p in parts),
            **over_rounds("ttft_ms", parts, "ttft_s", scale=1e3),
            "tokens_per_s": spread(p["num_tokens"] / p["wall_s"] for p in parts),
            **{name: spread(p[name] for p in parts) for name in plain},
        }
        if part == "busy":
            figures[part] |= over_rounds("gap_ms", parts, "gap_s", scale=1e3)
    names = sorted({name for one in rounds for name in one["counters"]})
    figures["counters"] = {name: spread(one["counters"].get(name) for one in rounds) for name in names}
    figures["compiles"] = sum(one["compiles"] for one in rounds)
    return figures


def scheduler_figures(rounds: Rounds) -> dict[str, Any]:
    figures = {}
    for part in ("decode", "arrive"):
        parts = [one[part] for one in rounds]
        figures[part] = {
            **over_rounds("scheduler_us", parts, "scheduler_s", scale=1e6),
            **over_rounds("schedule_us", parts, "schedule_s", scale=1e6),
            **over_rounds("update_us", parts, "update_s", scale=1e6),
            **over_rounds("pickle_us", parts, "pickle_s", scale=1e6),
            **over_rounds("metadata_nbytes", parts, "metadata_nbytes"),
            "cached_tokens": spread(p["cached_tokens"] for p in parts),
        }
    return figures


ENGINE_ROWS = (
    ("serve", "tokens_per_s", "tokens/s"),
    ("serve", "wall_s", "seconds"),
    ("serve", "ttft_ms_p50", "TTFT of later turns, median (ms)"),
    ("serve", "ttft_ms_p90", "TTFT of later turns, p90 (ms)"),
    ("serve", "scheduler_us_p50", "scheduler per step, median (us CPU)"),
    ("serve", "scheduler_us_p90", "scheduler per step, p90 (us CPU)"),
    ("serve", "scheduler_ms_total", "scheduler, total (ms CPU)"),
    ("serve", "num_steps", "steps"),
    ("serve", "num_empty_steps", "steps that computed nothing"),
    ("serve", "loaded_tokens", "prompt tokens loaded"),
    ("serve", "computed_tokens", "prompt tokens computed"),
    ("idle", "ttft_ms_p50", "TTFT, median (ms)"),
    ("idle", "ttft_ms_p90", "TTFT, p90 (ms)"),
    ("idle", "scheduler_us_p50", "scheduler per step, median (us CPU)"),
    ("idle", "num_steps", "steps"),
    ("idle", "loaded_tokens", "prompt tokens loaded"),
    ("idle", "computed_tokens", "prompt tokens computed"),
    ("busy", "ttft_ms_p50", "TTFT, median (ms)"),
    ("busy", "ttft_ms_p90", "TTFT, p90 (ms)"),
    ("busy", "gap_ms_p50", "longest gap of the others, median (ms)"),
    ("busy", "gap_ms_p90", "longest gap of the others, p90 (ms)"),
    ("busy", "scheduler_us_p50", "scheduler per step, median (us CPU)"),
    ("busy", "scheduler_us_p90", "scheduler per step, p90 (us CPU)"),
    ("busy", "loaded_tokens", "prompt tokens loaded"),
    ("counters", "staging_peak_blocks", "staging blocks, peak"),
    ("counters", "dropped_save_blocks", "save blocks dropped"),
    ("counters", "dropped_load_blocks", "load blocks dropped"),
    ("counters", "saved_blocks", "blocks saved"),
    ("counters", "loaded_blocks", "blocks loaded"),
)
SCHEDULER_ROWS = tuple(
    (part, name, text)
    for part in ("decode", "arrive")
    for name, text in (
        ("scheduler_us_p50", "per step, median (us CPU)"),
        ("scheduler_us_p90", "per step, p90 (us CPU)"),
        ("schedule_us_p50", "schedule(), median (us CPU)"),
        ("update_us_p50", "update_from_output(), median (us CPU)"),
        ("pickle_us_p50", "pickling the metadata, median (us CPU)"),
        ("metadata_nbytes_p50", "metadata, median (bytes)"),
        ("cached_tokens", "prompt tokens found"),
    )
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--part", nargs="+", choices=["engine", "scheduler"], default=["engine", "scheduler"])
    add("--variants", nargs="+", choices=["none", "peer", "ours"], default=["none", "peer", "ours"])
    add("--ours", nargs="+", choices=list(OURS), default=None, help="default: all")
    add("--repeats", type=count, default=7, help="rounds of each variant")
    add("--max-warm-ups", type=count, default=4, help="most warm-up rounds, until one compiles nothing")
    add("--async-scheduling", action="store_true")
    add("--quick", action="store_true", help="minimal sizes, to check that it runs")
    model = parser.add_argument_group("model").add_argument
    model("--layers", type=count, default=2)
    model("--hidden", type=count, default=256)
    model("--heads", type=count, default=2)
    model("--kv-heads", type=count, default=2)
    model("--dtype", default="float32", help="bfloat16 logits can tie, and rounding then decides the token")
    engine = parser.add_argument_group("engine").add_argument
    engine("--block-size", type=count, default=16)
    engine("--hbm-blocks", type=count, default=288)
    engine("--host-blocks", type=count, default=2048)
    engine("--staging-blocks", type=count, default=128)
    engine("--max-num-seqs", type=count, default=4)
    engine("--max-num-batched-tokens", type=count, default=256)
    load = parser.add_argument_group("conversations").add_argument
    load("--conversations", type=count, default=8)
    load("--turns", type=count, default=3)
    load("--prompt-tokens", type=count, default=600, help="tokens of a first prompt")
    load("--turn-tokens", type=count, default=64, help="tokens that a later turn adds")
    load("--max-tokens", type=count, default=16, help="tokens of an answer")
    load("--probe-tokens", type=count, default=4, help="tokens of an answer in the idle and busy parts")
    load("--background", type=count, default=3, help="decoding requests in the busy part")
    load("--background-tokens", type=count, default=200, help="tokens of their answers")
    alone = parser.add_argument_group("scheduler alone").add_argument
    alone("--running", type=count, default=256, help="decoding requests")
    alone("--decode-steps", type=count, default=200)
    alone("--arrivals", type=count, default=60, help="requests whose whole prompt is in the host tier")
    alone("--arrival-tokens", type=count, default=2000)
    alone("--scheduler-staging-blocks", type=count, default=1024)
    args = parser.parse_args(argv)
    if args.quick:
        args.repeats, args.max_warm_ups, args.conversations, args.turns = 1, 1, 4, 2
        args.prompt_tokens, args.hbm_blocks, args.background_tokens = 120, 40, 40
        args.running, args.decode_steps, args.arrivals, args.arrival_tokens = 16, 20, 8, 200
    args.ours = args.ours or list(OURS)
    longest = args.prompt_tokens + (args.turns + 2) * (args.turn_tokens + args.max_tokens)
    args.max_model_len = -(-max(longest, args.background_tokens + 64) // args.block_size) * args.block_size
    args.scheduler_host_blocks = 4 * args.arrivals * (args.arrival_tokens // args.block_size + 16)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    variants = [v for v in args.variants if v != "ours"]
    variants += [f"ours-{name}" for name in args.ours if "ours" in args.variants]
    report = {}
    if "engine" in args.part:
        report["engine"] = measure_engines(variants, args)
    if "scheduler" in args.part:
        report["scheduler"] = measure_schedulers(variants, args)
    write_json(args, question="what offloading costs and gains in vLLM", **report)
    return 0


def measure_engines(variants: list[str], args: argparse.Namespace) -> dict[str, Any]:
    found, rounds = run(start_engines(variants, args), variants, args)
    check_tokens(rounds)
    figures = {variant: engine_figures(rounds[variant]) for variant in variants}
    for answers in rounds.values():
        for answer in answers:
            del answer["tokens"]
    title = f"a whole engine: median (min-max) of {args.repeats} rounds"
    print_table(title, ["part", "", *variants], figure_rows(ENGINE_ROWS, list(figures.values())), num_labels=2)
    print("all variants generated the same tokens; the peer does not count its drops")
    for variant, one in figures.items():
        if one["compiles"]:
            print(f"{variant} compiled {one['compiles']} programs in measured rounds: raise --max-warm-ups")
    return {"started": found, "figures": figures, "rounds": rounds}


def measure_schedulers(variants: list[str], args: argparse.Namespace) -> dict[str, Any]:
    alone = [
        v for v in variants if v != "ours-staged" or "ours-async" not in variants
    ]  # the scheduler alone has no copy paths
    _, rounds = run(start_schedulers(alone, args), alone, args)
    figures = {variant: scheduler_figures(rounds[variant]) for variant in alone}
    title = f"the scheduler alone, {args.running} requests decoding: median (min-max) of {args.repeats} rounds"
    print_table(title, ["part", "", *alone], figure_rows(SCHEDULER_ROWS, list(figures.values())), num_labels=2)
    return {"figures": figures, "rounds": rounds}


if __name__ == "__main__":
    sys.exit(main())
