"""What does offloading cost vLLM on TPU, and what does it gain, next to tpu-inference's own connector?

The same conversations through vLLM and tpu-inference without a connector (`none`), with tpu-inference's (`peer`),
and with ours in several ways (`--ours`). Each has a process of its own, started once and warmed up until a round
compiles nothing; then each measures a round in turn. All have to generate the same tokens. `vllm_engine.py` tells
what is in a round. Then the same with vLLM's scheduler alone (`vllm_scheduler.py`). The limit is in the same run:
`none`, which computes everything and schedules for nobody else.

  .venv-vllm/bin/python benchmarks/bench_vllm.py --repeats 7 --json vllm.json
  .venv-vllm/bin/python benchmarks/bench_vllm.py --part scheduler --ours async

Needs the environment that `scripts/vllm_cpu/setup.sh` makes. "HBM" is memory of the host there, so the seconds of a
copy say nothing about a TPU; those of the scheduler and of the steps that a request takes do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_common import OURS, environment_of

HERE = Path(__file__).parent


class Child:
    """A process with one variant."""

    def __init__(self, script, variant, args):
        self.variant = variant
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as this object)
        environ = environment_of(variant, args)
        if script == "vllm_scheduler.py":
            environ |= {"VLLM_TARGET_DEVICE": "cpu", "TPU_OFFLOAD_NUM_CPU_CHUNKS": str(args.scheduler_host_blocks)}
            environ["TPU_OFFLOAD_NUM_STAGING_BLOCKS"] = str(args.scheduler_staging_blocks)
            environ["PYTHONPATH"] = str(HERE.parent)
        settings = vars(args) | {"variant": variant}
        if script == "vllm_scheduler.py":
            settings["host_blocks"] = args.scheduler_host_blocks
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environ,
        )  # fmt: skip

    def answer(self):
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-40:])
            sys.exit(f"{tail}\n{self.variant} ended with status {self._process.returncode}; its last lines are above")
        return json.loads(line)

    def ask(self, **question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self):
        self._process.kill()
        self._process.wait()
        self._log.close()


def run(script, variants, args):
    """Rounds of all variants, in turn: the environment, and a list of answers for each."""
    children = []
    try:
        found = {}
        for variant in variants:
            children.append(Child(script, variant, args))
        for child in children:
            found[child.variant] = child.answer()
            print(f"{child.variant} is up", flush=True)
        for child in children:
            for i in range(args.max_warm_ups):
                answer = child.ask(seed=100 + i)
                if not answer.get("compiles"):
                    break
            print(f"{child.variant} is warm after {i + 1} rounds", flush=True)
        rounds = {variant: [] for variant in variants}
        for repeat in range(args.repeats):
            for child in children if repeat % 2 == 0 else children[::-1]:
                rounds[child.variant].append(child.ask(seed=repeat))
            print(f"round {repeat + 1} of {args.repeats}", flush=True)
        return found, rounds
    finally:
        for child in children:
            child.close()


def check_tokens(rounds):
    """Exits unless every request that ended in two variants has the same tokens in both."""
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


def spread(values):
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentile(values, percent):
    values = sorted(values)
    return values[min(len(values) - 1, round(percent / 100 * (len(values) - 1)))] if values else None


def engine_figures(rounds):
    """A variant's figures: over rounds, of a round's median, percentile or sum."""
    figures = {}
    for part in ("serve", "idle", "busy"):
        parts = [one["parts"][part] for one in rounds]
        figures[part] = {
            "scheduler_us_p50": spread([1e6 * percentile(p["scheduler_s"], 50) for p in parts]),
            "scheduler_us_p90": spread([1e6 * percentile(p["scheduler_s"], 90) for p in parts]),
            "scheduler_ms_total": spread([1e3 * sum(p["scheduler_s"]) for p in parts]),
            "ttft_ms_p50": spread([1e3 * percentile(p["ttft_s"], 50) for p in parts]),
            "ttft_ms_p90": spread([1e3 * percentile(p["ttft_s"], 90) for p in parts]),
            "tokens_per_s": spread([p["num_tokens"] / p["wall_s"] for p in parts]),
            **{
                name: spread([p[name] for p in parts])
                for name in ("wall_s", "num_steps", "num_empty_steps", "prompt_tokens", "hbm_tokens", "loaded_tokens",
                             "computed_tokens")
            },
        }  # fmt: skip
        if part == "busy":
            figures[part]["gap_ms_p50"] = spread([1e3 * g for p in parts if (g := percentile(p["gap_s"], 50))])
            figures[part]["gap_ms_p90"] = spread([1e3 * g for p in parts if (g := percentile(p["gap_s"], 90))])
    names = sorted({name for one in rounds for name in one["counters"]})
    figures["counters"] = {name: spread([one["counters"].get(name) for one in rounds]) for name in names}
    figures["compiles"] = sum(one["compiles"] for one in rounds)
    return figures


def scheduler_figures(rounds):
    figures = {}
    for part in ("decode", "arrive"):
        parts = [one[part] for one in rounds]
        figures[part] = {
            "scheduler_us_p50": spread([1e6 * percentile(p["scheduler_s"], 50) for p in parts]),
            "scheduler_us_p90": spread([1e6 * percentile(p["scheduler_s"], 90) for p in parts]),
            "schedule_us_p50": spread([1e6 * percentile(p["schedule_s"], 50) for p in parts]),
            "update_us_p50": spread([1e6 * percentile(p["update_s"], 50) for p in parts]),
            "pickle_us_p50": spread([1e6 * v for p in parts if (v := percentile(p["pickle_s"], 50))]),
            "metadata_nbytes_p50": spread([percentile(p["metadata_nbytes"], 50) for p in parts]),
            "cached_tokens": spread([p["cached_tokens"] for p in parts]),
        }
    return figures


ENGINE_ROWS = (
    ("serve", "tokens_per_s", "tokens/s"),
    ("serve", "wall_s", "seconds"),
    ("serve", "ttft_ms_p50", "TTFT of later turns, median (ms)"),
    ("serve", "ttft_ms_p90", "TTFT of later turns, p90 (ms)"),
    ("serve", "scheduler_us_p50", "scheduler a step, median (us CPU)"),
    ("serve", "scheduler_us_p90", "scheduler a step, p90 (us CPU)"),
    ("serve", "scheduler_ms_total", "scheduler in all (ms CPU)"),
    ("serve", "num_steps", "steps"),
    ("serve", "num_empty_steps", "steps that computed nothing"),
    ("serve", "loaded_tokens", "prompt tokens loaded"),
    ("serve", "computed_tokens", "prompt tokens computed"),
    ("idle", "ttft_ms_p50", "TTFT, median (ms)"),
    ("idle", "ttft_ms_p90", "TTFT, p90 (ms)"),
    ("idle", "scheduler_us_p50", "scheduler a step, median (us CPU)"),
    ("idle", "num_steps", "steps"),
    ("idle", "loaded_tokens", "prompt tokens loaded"),
    ("idle", "computed_tokens", "prompt tokens computed"),
    ("busy", "ttft_ms_p50", "TTFT, median (ms)"),
    ("busy", "ttft_ms_p90", "TTFT, p90 (ms)"),
    ("busy", "gap_ms_p50", "longest gap of the others, median (ms)"),
    ("busy", "gap_ms_p90", "longest gap of the others, p90 (ms)"),
    ("busy", "scheduler_us_p50", "scheduler a step, median (us CPU)"),
    ("busy", "scheduler_us_p90", "scheduler a step, p90 (us CPU)"),
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
        ("scheduler_us_p50", "a step, median (us CPU)"),
        ("scheduler_us_p90", "a step, p90 (us CPU)"),
        ("schedule_us_p50", "schedule(), median (us CPU)"),
        ("update_us_p50", "update_from_output(), median (us CPU)"),
        ("pickle_us_p50", "pickling the metadata, median (us CPU)"),
        ("metadata_nbytes_p50", "metadata, median (bytes)"),
        ("cached_tokens", "prompt tokens found"),
    )
)


def show(title, rows, figures):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("part")
    table.add_column("")
    for variant in figures:
        table.add_column(variant, justify="right")
    last = None
    for part, name, text in rows:
        cells = [figures[variant][part].get(name) for variant in figures]
        if not any(cells):
            continue
        if last is not None and part != last:
            table.add_section()
        table.add_row("" if part == last else part, text, *map(cell, cells))
        last = part
    Console(width=max(100, 60 + 28 * len(figures)) if not sys.stdout.isatty() else None).print(table)


def cell(one):
    if one is None:
        return "-"
    digits = 0 if one["median"] >= 1000 else 1
    low, middle, high = (f"{one[k]:.{digits}f}".removesuffix(".0") for k in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low}-{high})"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", nargs="+", choices=["engine", "scheduler"], default=["engine", "scheduler"])
    add("--variants", nargs="+", choices=["none", "peer", "ours"], default=["none", "peer", "ours"])
    add("--ours", nargs="+", choices=list(OURS), default=None, help="default: all")
    add("--repeats", type=int, default=7, help="rounds of each variant")
    add("--max-warm-ups", type=int, default=4, help="rounds before, until one compiles nothing")
    add("--async-scheduling", action="store_true")
    add("--json", help="write everything to this file")
    add("--quick", action="store_true", help="sizes that only show that it runs")
    model = parser.add_argument_group("model").add_argument
    model("--layers", type=int, default=2)
    model("--hidden", type=int, default=256)
    model("--heads", type=int, default=2)
    model("--kv-heads", type=int, default=2)
    model("--dtype", default="float32", help="in bfloat16 logits tie, and rounding decides which token wins")
    engine = parser.add_argument_group("engine").add_argument
    engine("--block-size", type=int, default=16)
    engine("--hbm-blocks", type=int, default=288)
    engine("--host-blocks", type=int, default=2048)
    engine("--staging-blocks", type=int, default=128)
    engine("--max-num-seqs", type=int, default=4)
    engine("--max-num-batched-tokens", type=int, default=256)
    load = parser.add_argument_group("conversations").add_argument
    load("--conversations", type=int, default=8)
    load("--turns", type=int, default=3)
    load("--prompt-tokens", type=int, default=600, help="of a first turn")
    load("--turn-tokens", type=int, default=64, help="that a later turn adds")
    load("--max-tokens", type=int, default=16, help="of an answer")
    load("--probe-tokens", type=int, default=4, help="of an answer in the idle and busy parts")
    load("--background", type=int, default=3, help="requests that decode in the busy part")
    load("--background-tokens", type=int, default=200, help="of the answers of these")
    alone = parser.add_argument_group("scheduler alone").add_argument
    alone("--running", type=int, default=256, help="requests that decode")
    alone("--decode-steps", type=int, default=200)
    alone("--arrivals", type=int, default=60, help="requests that find all of their prompt in the host tier")
    alone("--arrival-tokens", type=int, default=2000)
    alone("--scheduler-staging-blocks", type=int, default=1024)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.max_warm_ups, args.conversations, args.turns = 1, 1, 4, 2
        args.prompt_tokens, args.hbm_blocks, args.background_tokens = 120, 40, 40
        args.running, args.decode_steps, args.arrivals, args.arrival_tokens = 16, 20, 8, 200
    args.ours = args.ours or list(OURS)
    longest = args.prompt_tokens + (args.turns + 2) * (args.turn_tokens + args.max_tokens)
    args.max_model_len = -(-max(longest, args.background_tokens + 64) // args.block_size) * args.block_size
    args.scheduler_host_blocks = 4 * args.arrivals * (args.arrival_tokens // args.block_size + 16)
    return args


def main():
    args = parse()
    variants = [v for v in args.variants if v != "ours"]
    variants += [f"ours-{name}" for name in args.ours if "ours" in args.variants]
    report = {"question": "what offloading costs and gains in vLLM", "date": time.strftime("%Y-%m-%d")}
    report |= {"settings": vars(args) | {"argv": sys.argv[1:]}, "load_average": os.getloadavg()}
    if "engine" in args.part:
        found, rounds = run("vllm_engine.py", variants, args)
        report |= {key: found[variants[0]][key] for key in ("versions", "device")}
        check_tokens(rounds)
        figures = {variant: engine_figures(rounds[variant]) for variant in variants}
        for answers in rounds.values():
            for answer in answers:
                del answer["tokens"]
        show(f"a whole engine: median (min-max) of {args.repeats} rounds", ENGINE_ROWS, figures)
        print("all variants generated the same tokens; the peer does not count what it drops")
        for variant, one in figures.items():
            if one["compiles"]:
                print(f"{variant} compiled {one['compiles']} programs in measured rounds: raise --max-warm-ups")
        report["engine"] = {"started": found, "figures": figures, "rounds": rounds}
    if "scheduler" in args.part:
        alone = [v for v in variants if v != "ours-staged" or "ours-async" not in variants]  # it knows no copy paths
        found, rounds = run("vllm_scheduler.py", alone, args)
        report |= {key: found[alone[0]][key] for key in ("versions", "device")} if "versions" not in report else {}
        figures = {variant: scheduler_figures(rounds[variant]) for variant in alone}
        title = f"the scheduler alone, {args.running} requests decoding: median (min-max) of {args.repeats} rounds"
        show(title, SCHEDULER_ROWS, figures)
        report["scheduler"] = {"figures": figures, "rounds": rounds}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
