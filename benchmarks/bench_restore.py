"""Does the choice between loading KV from storage and computing it again pick the faster one?

An engine for each of the three settings of TPU_OFFLOAD_LOAD_MODE (`load`, `recompute`, `auto`) serves prompts whose KV
is in storage only: HBM's prefix cache and the host tier have forgotten it. Each prompt length is measured with each
tier: real files, and tiers in memory that read at a given rate (MB/s). The engines take turns. A first round is not
counted: `auto` loads until it has measured both ways.

The model is small, with attention over all tokens, so that the time to compute a token grows with its position as in a
real one; with the default sizes, computing KV yields 4 MB/s for prompts of 1,000 tokens and 0.6 MB/s for 32,768.

  python benchmarks/bench_restore.py --directory DIR --tiers file 0.6 1.5 4 --rounds 5 --json restore.json
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from common import Spread, count, in_turn, make_parser, print_table, write_json

from tpu_offload import OffloadConfig, StepReport
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, Request, RequestOutput, SamplingParams

BLOCK_SIZE, BLOCKS_PER_CHUNK = 16, 16
MODES = ("load", "recompute", "auto")
MODEL = ModelConfig(num_layers=1, d_model=256, num_heads=1, num_kv_heads=1, head_dim=32, d_ff=1024)


def chunks_of(num_tokens: int) -> int:
    return num_tokens // (BLOCK_SIZE * BLOCKS_PER_CHUNK)


class Server:
    """An engine above storage that serves one prompt at a time.

    Args:
      mode: TPU_OFFLOAD_LOAD_MODE.
      num_tokens: the prompt lengths; the prompts are stored.
      storage: settings of the tier.
    """

    def __init__(self, mode: str, num_tokens: Sequence[int], storage: dict[str, Any]) -> None:
        longest, self._num_served = max(num_tokens), 0
        self._num_host_chunks = 2 * chunks_of(longest) + 2  # a promotion takes half of them at most
        config = OffloadConfig.create(
            load_mode=mode,
            blocks_per_chunk=BLOCKS_PER_CHUNK,
            num_cpu_chunks=self._num_host_chunks,
            num_storage_chunks=sum(map(chunks_of, num_tokens)),
            # Forced loads wait for all of it.
            storage_wait_s=3600.0 if mode == "load" else 0.5,
            job_timeout_s=3600.0,
            metrics_log_interval=0.0,
            **storage,
        )
        engine = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=longest // BLOCK_SIZE + 4,
            max_num_seqs=1,
            max_model_len=longest + BLOCK_SIZE,
            max_num_batched_tokens=256,
        )
        self._engine = Engine(MODEL, engine, offload=config)
        self._engine.warm_up()
        self._engine.wait_for_host_memory()
        rng = np.random.default_rng(0)
        self._prompts = {n: tuple(rng.integers(0, MODEL.vocab_size, n).tolist()) for n in num_tokens}
        self._expected = {n: self._serve(n)[0] for n in num_tokens}
        stored = len(self._engine.stored_block_hashes())
        assert stored == sum(map(chunks_of, num_tokens)), f"{stored} chunks are stored"

    def measure(self, num_tokens: int) -> tuple[float, int]:
        """Serves a prompt; returns its time to the first token in seconds, and how many of its tokens were loaded."""
        tokens, output = self._serve(num_tokens)
        assert tokens == self._expected[num_tokens], "other KV was loaded"
        assert output.stats is not None
        assert output.stats.ttft_s is not None
        return output.stats.ttft_s, output.stats.prompt_tokens.host

    def _serve(self, num_tokens: int) -> tuple[Any, RequestOutput]:
        engine = self._engine
        self._num_served += 1
        engine.add_request(
            Request(
                request_id=f"r{self._num_served}",
                prompt_tokens=self._prompts[num_tokens],
                sampling=SamplingParams(max_tokens=1),
            )
        )
        outputs: list[RequestOutput] = []
        while engine.has_unfinished:
            outputs += engine.step()
        engine.settle()
        self._forget()
        return outputs[-1].tokens, outputs[-1]

    def _forget(self) -> None:
        """HBM's prefix cache is invalid, and a worker reports that it has lost all slots of the host tier."""
        assert self._engine._offload is not None
        self._engine._scheduler.invalidate_prefixes()
        slots = self._num_host_chunks
        self._engine._offload._scheduler.apply(
            StepReport(worker_id=0, results=(), num_host_slots=(slots,), lost_slots=((0, 0, slots),))
        )

    def close(self) -> None:
        self._engine.close()


@contextlib.contextmanager
def servers(tier: str, args: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """An engine for each mode, each above storage of its own."""
    with contextlib.ExitStack() as stack:
        found = {}
        for mode in MODES:
            storage = {"storage_tier": "throttled_tier:ThrottledTier", "storage_options": tier}
            if tier == "file":
                directory = stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory))
                storage = {"storage_tier": "file", "storage_options": f"{directory},min_free_gb=0"}
            found[mode] = server = Server(mode, args.num_tokens, storage)
            stack.callback(server.close)
        yield found


def measure(tier: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    seconds: dict[tuple[int, str], list[float]] = {}
    loaded: dict[int, list[int]] = {}
    with servers(tier, args) as found:
        for number in range(-1, args.rounds):
            for num_tokens in args.num_tokens:
                for mode in in_turn(MODES, max(0, number)):
                    ttft_s, num_loaded = found[mode].measure(num_tokens)
                    if number >= 0:
                        seconds.setdefault((num_tokens, mode), []).append(ttft_s)
                        if mode == "auto":
                            loaded.setdefault(num_tokens, []).append(num_loaded)
    return [
        summarize(tier, num_tokens, {mode: seconds[num_tokens, mode] for mode in MODES}, loaded[num_tokens])
        for num_tokens in args.num_tokens
    ]


def summarize(tier: str, num_tokens: int, seconds: dict[str, list[float]], loaded: list[int]) -> dict[str, Any]:
    better = min(("load", "recompute"), key=lambda mode: statistics.median(seconds[mode]))
    return {
        "tier": tier,
        "num_tokens": num_tokens,
        "ttft_s": {mode: Spread.of(times) for mode, times in seconds.items()},
        "better": better,
        "loads": sum(num > 0 for num in loaded),
        "auto_to_better": Spread.of(a / b for a, b in zip(seconds["auto"], seconds[better], strict=True)),
        "median_to_median": statistics.median(seconds["auto"]) / statistics.median(seconds[better]),
    }


def tier(text: str) -> str:
    """Parses the name of a tier."""
    with contextlib.suppress(ValueError):
        if text == "file" or 0 < float(text) < 1e9:
            return text
    raise argparse.ArgumentTypeError(f"got {text!r}; expected `file`, or a number of MB/s above 0")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-tokens", type=count, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--tiers", type=tier, nargs="+", default=["file", "0.6", "1.5", "4"], help="`file`, or MB/s")
    parser.add_argument("--directory", help="of the file tier; the system's for temporary files if it is not given")
    parser.add_argument("--rounds", type=count, default=5)
    args = parser.parse_args(argv)
    if min(args.num_tokens) <= BLOCK_SIZE * BLOCKS_PER_CHUNK:
        parser.error(f"--num-tokens {min(args.num_tokens)} is less than a chunk and a token")
    results = [row for name in args.tiers for row in measure(name, args)]
    print_table(
        f"Time to the first token, ms: median (minimum to maximum) of {args.rounds} rounds",
        ("tier, MB/s", "tokens", *MODES, "loads", "auto / better", "of the medians"),
        [
            (
                row["tier"],
                f"{row['num_tokens']:,}",
                *(Spread.of([s.median, s.min, s.max], scale=1e3).range(0) for s in row["ttft_s"].values()),
                f"{row['loads']} of {args.rounds}",
                row["auto_to_better"].range(),
                f"{row['median_to_median']:.2f}",
            )
            for row in results
        ],
        num_labels=1,
    )
    write_json(args, question="does the choice between load and recompute pick the faster one", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
