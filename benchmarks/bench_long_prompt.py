"""How much sooner does the first token of a resident prompt come that is longer than the staging buffer?

One engine serves a prompt (computed), other prompts that push it out of HBM, and the same prompt again (loaded). The
time to its first token then, by the time that computing it took in the same round, for each path and length. At c256fa7
no more than the staging buffer of such a prompt was loaded, on any path.

  python benchmarks/bench_long_prompt.py --num-tokens 512 2048 --paths direct staged --staging-tokens 256 --json r.json
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics

import jax
import numpy as np

from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, Request, SamplingParams

BLOCK_SIZE = 16


def serve(engine, name, prompt):
    engine.add_request(Request(name, prompt, SamplingParams(1)))
    outputs = []
    while engine.has_unfinished:
        outputs += [output for output in engine.step() if output.finished]
    return outputs[-1]


def prompt(rng, num_tokens, vocab_size):
    return tuple(rng.integers(0, vocab_size, num_tokens).tolist())


def run(path, num_tokens, args):
    model = ModelConfig()
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 2
    config = dataclasses.replace(
        EngineConfig(), block_size=BLOCK_SIZE, num_blocks=num_blocks + 2, max_num_seqs=1, max_model_len=num_tokens + 16
    )
    settings = {"staging_buffer_tokens": args.staging_tokens, "num_cpu_chunks": 3 * num_blocks * (args.rounds + 1)}
    engine = Engine(model, config, offload=OffloadConfig.create(save_path=path, load_path=path, **settings))
    engine.wait_for_host_memory()
    rng = np.random.default_rng(0)
    rounds = []
    for i in range(args.rounds + 1):
        wanted, other = (prompt(rng, num_tokens, model.vocab_size) for _ in range(2))
        first = serve(engine, f"first {i}", wanted)
        serve(engine, f"other {i}", other)
        again = serve(engine, f"again {i}", wanted)
        assert again.tokens == first.tokens
        rounds.append((first.stats.ttft_s, again.stats.ttft_s, again.stats.prompt_tokens.host))
    engine.close()
    computed, loaded, hits = zip(*rounds[1:], strict=True)  # the first compiles
    ratios = sorted(warm / cold for cold, warm in zip(computed, loaded, strict=True))
    return {
        "path": path,
        "num_tokens": num_tokens,
        "loaded_tokens": min(hits),
        "computed_ttft_s": statistics.median(computed),
        "loaded_ttft_s": statistics.median(loaded),
        "ratio": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--paths", nargs="+", choices=["direct", "staged"], default=["direct", "staged"])
    parser.add_argument("--staging-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    results = []
    for num_tokens in args.num_tokens:
        for path in args.paths:
            results.append(row := run(path, num_tokens, args))
            ratio = row["ratio"]
            print(
                f"{path}, {num_tokens} tokens: {row['loaded_tokens']} loaded; first token after "
                f"{row['computed_ttft_s'] * 1e3:.1f} ms computed, {row['loaded_ttft_s'] * 1e3:.1f} ms loaded: "
                f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
            )
    if args.json:
        device = jax.devices()[0]
        about = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
        about |= {"python": platform.python_version(), "cores": os.cpu_count(), "args": vars(args)}
        with open(args.json, "w") as file:
            json.dump(about | {"results": results}, file, indent=1)


if __name__ == "__main__":
    main()
