"""What does offloading cost when it is never needed?

Serves chats with HBM large enough for all of them, with and without offloading, interleaved: each round serves the
same new conversations on both engines, in alternating order, and yields one ratio of tokens/s. Every prompt block is
saved to the host; none is ever loaded.

    python benchmarks/bench_overhead.py --rounds 12 --json overhead.json
"""

import sys
from collections.abc import Sequence

from common import Spread, count, in_turn, make_parser, write_json

from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, SamplingParams
from tpu_offload.replay.serving import ServedRun, serve
from tpu_offload.replay.workloads import Workload, chat_workload


def run(engine: Engine, workload: Workload, concurrency: int) -> ServedRun:
    return serve(
        engine,
        workload,
        concurrency=concurrency,
        sampling=lambda request_id, max_tokens: SamplingParams(max_tokens=max_tokens),
        on_finish=lambda: None,
        stop=lambda: False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=count, default=12)
    parser.add_argument("--requests", type=count, default=60, help="requests per round")
    parser.add_argument("--concurrency", type=count, default=4)
    args = parser.parse_args(argv)

    workloads = [chat_workload(num_requests=args.requests, turns=5, seed=1000 + i) for i in range(args.rounds + 1)]
    engine_config = EngineConfig(
        num_blocks=sum(w.num_unique_blocks(16) for w in workloads) + 64,
        max_num_seqs=args.concurrency,
        max_model_len=max(w.longest_request for w in workloads),
    )
    offload = OffloadConfig.create(num_cpu_chunks=engine_config.num_blocks)
    engines = {
        "baseline": Engine(ModelConfig(), engine_config),
        "offload": Engine(ModelConfig(), engine_config, offload=offload),
    }
    for engine in engines.values():
        engine.warm_up()
        run(engine, workloads[-1], args.concurrency)

    ratios: list[float] = []
    for i, workload in enumerate(workloads[:-1]):
        tokens_per_s = {}
        for name in in_turn(list(engines), i):
            served = run(engines[name], workload, args.concurrency)
            tokens_per_s[name] = sum(len(r.tokens) for r in served.records) / served.wall_s
        ratios.append(tokens_per_s["offload"] / tokens_per_s["baseline"])
        print(f"round {i}: {tokens_per_s['baseline']:.1f} and {tokens_per_s['offload']:.1f} tokens/s, {ratios[-1]:.4f}")
    stats = engines["offload"].offload_stats()
    assert stats is not None
    assert stats.loaded_blocks == 0, "HBM is too small for the workload"
    ratio = Spread.of(ratios)
    print(
        f"tokens/s with offloading / without: median {ratio.median:.4f}, "
        f"{ratio.min:.4f} to {ratio.max:.4f} over {args.rounds} rounds; "
        f"saved {stats.saved_nbytes / 2**20:.1f} MiB"
    )
    results = {"ratio": ratio, "ratios": ratios, "saved_nbytes": stats.saved_nbytes}
    write_json(args, question="what offloading costs when it is never needed", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
