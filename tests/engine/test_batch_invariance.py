"""A token's KV and logits have the same bits for any chunking, neighbours and sizes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.helpers import random_tokens
from tpu_offload.engine import EngineConfig, ModelConfig, SamplingParams
from tpu_offload.engine.batch import TokenSpan
from tpu_offload.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("own_sizes")

# The widths of the default model, because XLA's matrix multiplication depends on them; fewer layers compile faster.
MODEL = dataclasses.replace(ModelConfig(), num_layers=2)
ENGINE = EngineConfig(block_size=16, num_blocks=96, max_num_seqs=6, max_model_len=320, max_num_batched_tokens=256)
OTHER_ENGINE = EngineConfig(block_size=8, num_blocks=120, max_num_seqs=3, max_model_len=400, max_num_batched_tokens=70)
GREEDY = SamplingParams(max_tokens=1)
TOKENS = random_tokens(0, 300, vocab_size=MODEL.vocab_size)


class Lab:
    """Computes `TOKENS` in given chunks, batched with random requests, in blocks poisoned by NaN."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runner = ModelRunner(MODEL, config)

    def compute(self, chunks, *, seed=None, tokens=TOKENS):
        """Bits of the KV, `[layers, tokens, ...]`, and the logits after each chunk, by position."""
        config, rng = self.config, np.random.default_rng(seed)
        self.runner.kv_caches = [jnp.full_like(cache, jnp.nan) for cache in self.runner.kv_caches]
        blocks = list(range(1, config.num_blocks + 1))
        if seed is not None:
            rng.shuffle(blocks)
        per_request = -(-len(tokens) // config.block_size)
        logits, start = {}, 0
        for n in chunks:
            runs = [TokenSpan(tokens[start : start + n], start, [blocks[:per_request]], GREEDY)]
            if seed is not None:
                runs += self._neighbours(rng, blocks[per_request:], config.max_num_batched_tokens - n)
            order = rng.permutation(len(runs)) if seed is not None else [0]
            output = self.runner.step([runs[i] for i in order])
            start += n
            logits[start] = np.asarray(output.logits[list(order).index(0)]).view(np.uint32)
        assert start == len(tokens)
        kv = np.stack([np.asarray(cache[jnp.asarray(blocks[:per_request])]) for cache in self.runner.kv_caches])
        kv = kv.reshape(kv.shape[0], -1, *kv.shape[3:])[:, : len(tokens)]
        return kv.view(np.uint16), logits

    def _neighbours(self, rng, blocks, budget):
        """Spans of other requests at position 0: they read only KV that they write."""
        runs = []
        for i in range(rng.integers(0, self.config.max_num_seqs)):
            n = int(rng.integers(1, 30))
            if n > budget:
                break
            own = blocks[i * 4 : i * 4 + 4]
            runs.append(TokenSpan(rng.integers(0, MODEL.vocab_size, n).tolist(), 0, [own], GREEDY))
            budget -= n
        return runs


@pytest.fixture(scope="module")
def lab():
    return Lab(ENGINE)


@pytest.fixture(scope="module")
def one_by_one(lab):
    """Every token decoded alone: the reference for all other schedules."""
    return lab.compute([1] * len(TOKENS))


def random_chunks(rng, total, largest):
    chunks = []
    while total:
        chunks.append(int(min(total, rng.integers(1, largest + 1))))
        total -= chunks[-1]
    return chunks


def assert_same_bits(result, reference):
    np.testing.assert_array_equal(result[0], reference[0])
    for position, logits in result[1].items():
        np.testing.assert_array_equal(logits, reference[1][position], err_msg=f"logits after {position} tokens")


def test_prefill_equals_decoding(lab, one_by_one):
    assert not np.isnan(one_by_one[0].view(jnp.bfloat16).astype(np.float32)).any()
    assert_same_bits(lab.compute([256, 44]), one_by_one)


@pytest.mark.parametrize("seed", range(6))
def test_random_chunks_and_neighbours(lab, one_by_one, seed):
    chunks = random_chunks(np.random.default_rng(seed), len(TOKENS), [7, 40, 100, 150, 200, 250][seed])
    assert_same_bits(lab.compute(chunks, seed=seed), one_by_one)


def test_decoding_among_prefills(lab, one_by_one):
    assert_same_bits(lab.compute([250, *[1] * 50], seed=9), one_by_one)


@pytest.mark.parametrize("seed", [None, 1])
def test_other_block_size_and_budget(one_by_one, seed):
    assert_same_bits(Lab(OTHER_ENGINE).compute([70, 69, 64, 1, 1, 17, 33, 45], seed=seed), one_by_one)


def test_another_token_changes_what_follows(lab, one_by_one):
    tokens = list(TOKENS)
    tokens[100] = (tokens[100] + 1) % MODEL.vocab_size
    kv, logits = lab.compute([256, 44], tokens=tokens)
    np.testing.assert_array_equal(kv[:, :100], one_by_one[0][:, :100])
    assert (kv[:, 100] != one_by_one[0][:, 100]).any()
    assert (kv[1, 101:] != one_by_one[0][1, 101:]).any(axis=(-3, -2, -1)).mean() > 0.5
    assert (logits[300] != one_by_one[1][300]).any()
