"""How much does loading lower the time to first token of a resident prompt longer than the staging buffer?

One engine serves a prompt (computed), other prompts that evict it from HBM, and the same prompt again (loaded). The
ratio of the two times to first token is taken within a round, for each path and length. At c256fa7 at most a staging
buffer's worth of such a prompt was loaded, on any path.

  python benchmarks/bench_long_prompt.py --num-tokens 512 2048 --paths direct staged --staging-tokens 256 --json r.json
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Spread, Stopwatch, count, make_parser, write_json

from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, Request, RequestOutput, SamplingParams

BLOCK_SIZE = 16


def serve(engine: Engine, name: str, prompt: tuple[int, ...]) -> RequestOutput:
    engine.add_request(Request(request_id=name, prompt_tokens=prompt, sampling=SamplingParams(max_tokens=1)))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += [output for output in engine.step() if output.stats]
    engine.settle()  # saves on their way would take the staging buffer from the next prompt
    return outputs[-1]


def run(path: str, num_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    model = ModelConfig()
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 2
    config = dataclasses.replace(
        EngineConfig(), block_size=BLOCK_SIZE, num_blocks=num_blocks + 2, max_num_seqs=1, max_model_len=num_tokens + 16
    )
    settings = {"staging_buffer_tokens": args.staging_tokens, "num_cpu_chunks": 3 * num_blocks * (args.rounds + 1)}
    engine = Engine(model, config, offload=OffloadConfig.create(save_path=path, load_path=path, **settings))
    engine.wait_for_host_memory()
    rng = np.random.default_rng(0)
    watch, hits = Stopwatch(), []
    for i in range(args.rounds + 1):
        wanted, other = (tuple(rng.integers(0, model.vocab_size, num_tokens).tolist()) for _ in range(2))
        first = serve(engine, f"first {i}", wanted)
        serve(engine, f"other {i}", other)
        again = serve(engine, f"again {i}", wanted)
        assert again.tokens == first.tokens
        assert first.stats is not None
        assert again.stats is not None
        if i:  # the first compiles
            watch.record("computed", first.stats.ttft_s or 0.0)
            watch.record("loaded", again.stats.ttft_s or 0.0)
            hits.append(again.stats.prompt_tokens.host)
    engine.close()
    return {
        "path": path,
        "num_tokens": num_tokens,
        "loaded_tokens": min(hits),
        "computed_ttft_s": Spread.of(watch.seconds["computed"]),
        "loaded_ttft_s": Spread.of(watch.seconds["loaded"]),
        "ratio": watch.ratio("loaded", "computed"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-tokens", type=count, nargs="+", default=[512, 2048])
    parser.add_argument("--paths", nargs="+", choices=["direct", "staged"], default=["direct", "staged"])
    parser.add_argument("--staging-tokens", type=count, default=256)
    parser.add_argument("--rounds", type=count, default=5)
    args = parser.parse_args(argv)
    results = []
    for num_tokens in args.num_tokens:
        for path in args.paths:
            results.append(row := run(path, num_tokens, args))
            print(
                f"{path}, {num_tokens} tokens: {row['loaded_tokens']} loaded; first token after "
                f"{row['computed_ttft_s'].median * 1e3:.1f} ms computed, {row['loaded_ttft_s'].median * 1e3:.1f} ms "
                f"loaded: {row['ratio'].range(3)}"
            )
    write_json(args, question="time to first token of a long resident prompt", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
