"""From which bandwidth on does a tier pay? Computed, not measured: `tpu_offload.plan.break_even` has the arithmetic.

    python benchmarks/bench_break_even.py --prefixes 2048 8192 32768 131072
    python benchmarks/bench_break_even.py --gb-per-s 1.7 6 100

Prints, as markdown, the bandwidth in GB/s over all chips at which loading a prefix of KV takes as long as computing it;
or, with `--gb-per-s`, the shortest prefix, up to 131,072 tokens, for which a tier of that bandwidth is faster.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from common import count, make_parser, write_json

from tpu_offload.plan import CHIPS, MFU_RANGE, ModelShape, break_even, find_model, least_prefix, prefix_nbytes

V6E = CHIPS["v6e"]
_CHIPS = {"llama-3.1-8b": (1, 4, 8), "llama-3.1-70b": (8, 16), "deepseek-v3": (32, 64)}
MODELS = tuple(map(find_model, _CHIPS))


def _fits(model: ModelShape, num_chips: int) -> bool:
    """Whether the weights fit, with a tenth of the HBM for everything else."""
    return model.weight_nbytes() <= 0.9 * V6E.hbm_nbytes * num_chips


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected GB/s, above 0")
    return value


def _prefix_rows(prefixes: Sequence[int], mfu: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {
            "model": model.name,
            "num_chips": num_chips,
            "token_nbytes": prefix_nbytes(model, end=1),
            "num_tokens": end,
            **{
                f"{name}_gb_per_s": value / 1e9
                for name, value in dataclasses.asdict(
                    break_even(model, V6E, num_chips=num_chips, end=end, mfu=mfu)
                ).items()
            },
        }
        for model in MODELS
        for num_chips in _CHIPS[model.name]
        if _fits(model, num_chips)
        for end in prefixes
    ]


def _rate_rows(rates: Sequence[float], mfu: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {
            "model": model.name,
            "num_chips": num_chips,
            "gb_per_s": rate,
            "least_tokens": [
                least_prefix(model, V6E, num_chips=num_chips, nbytes_per_s=rate * 1e9, mfu=one) for one in mfu
            ],
        }
        for model in MODELS
        for num_chips in _CHIPS[model.name]
        if _fits(model, num_chips)
        for rate in rates
    ]


def _print(rows: Sequence[dict[str, Any]], across: str, cell: Any, head: str) -> None:
    columns = list(dict.fromkeys((row["model"], row["num_chips"]) for row in rows))
    print(f"| {head} | " + " | ".join(f"{model}, {num} chip{'s' * (num > 1)}" for model, num in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for value in dict.fromkeys(row[across] for row in rows):
        cells = [cell(row) for row in rows if row[across] == value]
        print(f"| {value:,} | " + " | ".join(cells) + " |")


def _least(row: dict[str, Any]) -> str:
    low, high = (
        "never" if tokens is None else f"{tokens:,}" if tokens > 1 else "any" for tokens in row["least_tokens"]
    )
    return low if low == high else f"{low} to {high}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--prefixes", type=count, nargs="+", default=[2048, 8192, 32768, 131072], help="tokens")
    parser.add_argument("--gb-per-s", type=_rate, nargs="+", help="bandwidths of tiers, in place of prefixes")
    parser.add_argument("--mfu", type=float, nargs=2, default=MFU_RANGE, help="what prefill reaches of the peak")
    options = parser.parse_args(argv)
    if not all(0 < one <= 1 for one in options.mfu):
        parser.error(f"--mfu {options.mfu}; expected two shares above 0 up to 1")
    mfu = tuple(options.mfu)
    if options.gb_per_s:
        rows = _rate_rows(options.gb_per_s, mfu)
        _print(rows, "gb_per_s", _least, "GB/s")
    else:
        rows = _prefix_rows(options.prefixes, mfu)
        _print(
            rows, "num_tokens", lambda row: f"{row['low_gb_per_s']:.2g} to {row['high_gb_per_s']:.2g}", "prefix, tokens"
        )
    write_json(options, question="the bandwidth from which on a tier pays", chip=V6E, results=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
