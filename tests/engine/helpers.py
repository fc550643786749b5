"""A small model that compiles fast, random requests, and a serving loop."""

import dataclasses

import numpy as np

from tpu_offload.engine import Engine, EngineConfig, ModelConfig, Request, RequestOutput, SamplingParams
from tpu_offload.engine.block_manager import BlockManager
from tpu_offload.types import BlockHash

TINY = ModelConfig(vocab_size=96, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
# Three layer groups, of full attention and of two windows, that share one array.
WINDOWED = dataclasses.replace(TINY, num_layers=3, sliding_window=10, window_layers=(0, 2))
# A group with full attention, one with a window, and one of two layers with states.
STATEFUL = dataclasses.replace(
    TINY,
    num_layers=4,
    sliding_window=10,
    window_layers=(1,),
    state_layers=(0, 2),
    num_state_heads=2,
    state_head_dim=8,
)
SMALL_ENGINE = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=32)


def cached_hashes(manager: BlockManager, group_id: int = 0) -> set[BlockHash]:
    """What is in the prefix cache of a layer group."""
    keys = map(manager.key_of, range(1, manager.num_blocks + 1))
    return {key[1] for key in keys if key is not None and key[0] == group_id}


def random_tokens(seed: int, num_tokens: int, *, vocab_size: int = TINY.vocab_size) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, num_tokens).tolist())


def make_request(name: str, prompt: tuple[int, ...], *, max_tokens: int = 8, salt: str = "", **sampling) -> Request:
    return Request(
        request_id=name,
        prompt_tokens=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        cache_salt=salt,
    )


def serve(engine: Engine, requests: list[Request], *, max_steps: int = 2000) -> dict[str, RequestOutput]:
    """Serves requests; returns final outputs by request id. Checks invariants after every step."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return outputs
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        engine.check_invariants()
    raise AssertionError(f"{engine.stats()} after {max_steps} steps: the engine makes no progress")


def tokens_of(outputs: dict[str, RequestOutput]) -> dict[str, tuple[int, ...]]:
    assert not outputs or any(output.tokens for output in outputs.values()), "none of the requests was served"
    return {name: output.tokens for name, output in outputs.items()}


def rounds(num_rounds=3, *, max_tokens=6, num_prompts=6, **changes):
    """Rounds of the same prompts, some greedy and some sampled."""
    return [
        [
            dataclasses.replace(
                make_request(
                    f"{turn}-{i}",
                    random_tokens(i, 40 + 3 * i),
                    max_tokens=max_tokens + i,
                    temperature=float(i % 2),
                    seed=i,
                ),
                **changes,
            )
            for i in range(num_prompts)
        ]
        for turn in range(num_rounds)
    ]


def serve_rounds(engine, all_rounds):
    outputs: dict[str, RequestOutput] = {}
    for requests in all_rounds:
        outputs |= serve(engine, requests)
    return outputs


def num_loaded(outputs):
    return sum(output.stats.prompt_tokens.host for output in outputs.values())
