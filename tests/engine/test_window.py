"""Layers with a sliding window: equal to a dense reference, and the same bits for every schedule and ring."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.dense import dense_logits
from tests.engine.helpers import SMALL_ENGINE, TINY, random_tokens
from tpu_offload.engine import EngineConfig, ModelConfig, SamplingParams, attention
from tpu_offload.engine.batch import TokenSpan, pack
from tpu_offload.engine.config import num_blocks_of, window_ring_blocks
from tpu_offload.engine.runner import ModelRunner
from tpu_offload.errors import ConfigError

GREEDY = SamplingParams(1)
TOKENS = random_tokens(0, 300)  # three tiles of keys
WINDOWED = dataclasses.replace(TINY, num_layers=3, kv_dtype="float32", sliding_window=20, window_layers=(0, 2))
ENGINE = EngineConfig(block_size=16, num_blocks=64, max_num_seqs=3, max_model_len=320, max_num_batched_tokens=40)
# Windows: shorter than a block, one block, not a multiple of it, past the first tile, past the sequence.
SHAPES = [(1, 16), (5, 16), (16, 16), (37, 8), (150, 16), (400, 16)]


class Lab:
    """Computes tokens in given chunks; before every step all KV outside the windows is NaN."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self.model, self.engine = model, engine
        self.runner = ModelRunner(model, engine)
        self.ring_blocks = window_ring_blocks(model, engine)
        self.num_window_blocks = num_blocks_of(model, engine)[1]

    def compute(self, chunks, *, seed=None, tokens=TOKENS):
        """Bits of the KV, `[layers, tokens, ...]`, and of logits and log-probability after each chunk, by position.

        With a seed, batched with random requests, and with ring blocks replaced once no token can see them.
        """
        rng = np.random.default_rng(seed)
        blocks = rng.permutation(self.engine.num_blocks) if seed is not None else np.arange(self.engine.num_blocks)
        blocks, other_blocks = np.split(blocks, [-(-len(tokens) // self.engine.block_size)])
        ring, kv, outputs, start = np.arange(self.ring_blocks), [], {}, 0
        self._put([np.full(cache.shape, np.nan, cache.dtype) for cache in self.runner.kv_caches])
        for n in chunks:
            end = start + n
            runs = []
            if seed is not None:
                ring, other_ring = self._move(rng, ring, start)
                runs = self._neighbours(rng, other_blocks, other_ring, self.engine.max_num_batched_tokens - n)
            used = ring[: -(-end // self.engine.block_size)].tolist()
            row = int(rng.integers(len(runs) + 1))
            runs.insert(row, TokenSpan(tokens[start:end], start, blocks.tolist(), GREEDY, used))
            output = self.runner.step(runs)
            outputs[end] = bits(output.logits[row]), bits(output.logprobs[row])
            kv.append(self._read_and_poison(start, end, blocks, ring))
            start = end
        assert start == len(tokens)
        return np.concatenate(kv, axis=1), outputs

    def _seen(self, start):
        """Positions before `start` that a token at `start` attends to in a windowed layer."""
        return np.arange(max(0, start - self.model.sliding_window + 1), start)

    def _move(self, rng, ring, start):
        """The ring with other blocks at entries that are not read, and the remaining blocks."""
        live = np.unique(self._seen(start) // self.engine.block_size % self.ring_blocks)
        spare = rng.permutation(np.setdiff1d(np.arange(self.num_window_blocks), ring[live]))
        dead = np.setdiff1d(np.arange(self.ring_blocks), live)
        ring = ring.copy()
        ring[dead] = spare[: len(dead)]
        return ring, spare[len(dead) :]

    def _neighbours(self, rng, blocks, ring, budget):
        """Another request in the middle of its generation, whose past KV is NaN."""
        n = int(rng.integers(budget + 1))
        if n == 0:
            return []
        tokens = rng.integers(0, self.model.vocab_size, n).tolist()
        position = int(rng.integers(self.engine.max_model_len - n))
        # The remaining blocks, repeated: its own KV may be garbage.
        full_blocks = np.resize(blocks, self.engine.max_model_len // self.engine.block_size)
        return [TokenSpan(tokens, position, full_blocks.tolist(), GREEDY, np.resize(ring, self.ring_blocks).tolist())]

    def _read_and_poison(self, start, end, blocks, ring):
        """Returns the chunk's KV as f32 bits; sets all KV that token `end` does not attend to to NaN."""
        read, kept = [], []
        for i, cache in enumerate(np.asarray(c) for c in self.runner.kv_caches):
            window = self.model.window_of(i)

            def slots(positions, window=window):
                b = positions // self.engine.block_size
                return ring[b % self.ring_blocks] if window else blocks[b], positions % self.engine.block_size

            read.append(cache[slots(np.arange(start, end))])
            seen = slots(self._seen(end) if window else np.arange(end))
            kept.append(np.full_like(cache, np.nan))
            kept[-1][seen] = cache[seen]
        self._put(kept)
        return bits(np.stack(read))

    def _put(self, caches):
        self.runner.kv_caches = [jax.device_put(cache, jax.devices()[0]) for cache in caches]


def bits(x):
    x = np.asarray(x).astype(np.float32)
    assert np.isfinite(x).all()
    return x.view(np.uint32)


def random_chunks(rng, total, largest):
    chunks = []
    while total:
        chunks.append(int(min(total, rng.integers(1, largest + 1))))
        total -= chunks[-1]
    return chunks


def assert_same_bits(result, reference):
    np.testing.assert_array_equal(result[0], reference[0])
    for position, output in result[1].items():
        for got, expected in zip(output, reference[1][position], strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=f"after {position} tokens")


def windowed(window, block_size, **sizes):
    return (
        dataclasses.replace(WINDOWED, sliding_window=window),
        dataclasses.replace(ENGINE, block_size=block_size, **sizes),
    )


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def lab(request):
    return Lab(*windowed(*request.param))


@pytest.fixture(scope="module")
def one_by_one(lab):
    """Every token decoded alone: the reference for all other schedules."""
    return lab.compute([1] * len(TOKENS))


def test_logits_agree_with_the_dense_reference(lab, one_by_one):
    expected = dense_logits(lab.model, TOKENS)
    got = np.stack([logits.view(np.float32) for logits, _ in one_by_one[1].values()])
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


def test_largest_steps_have_the_bits_of_decoding(lab, one_by_one):
    budget = lab.engine.max_num_batched_tokens
    for first in (budget, 1, 13):
        num_full, rest = divmod(len(TOKENS) - first, budget)
        assert_same_bits(lab.compute([first, *[budget] * num_full, rest]), one_by_one)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_neighbours_and_places_change_no_bits(lab, one_by_one, seed):
    chunks = random_chunks(np.random.default_rng(seed), len(TOKENS), [5, 20, 40][seed])
    assert_same_bits(lab.compute(chunks, seed=seed), one_by_one)


def test_other_block_sizes_and_budgets_change_no_bits():
    """Also other rings. At the widths of the default model, because XLA's matrix multiplication depends on them."""
    wide = dataclasses.replace(ModelConfig(), num_layers=2, sliding_window=37, window_layers=(0,))
    reference = Lab(wide, ENGINE).compute([1] * len(TOKENS))
    sizes: dict[str, Any] = {"block_size": 8, "num_blocks": 90, "max_num_batched_tokens": 100, "max_num_seqs": 5}
    other = Lab(wide, dataclasses.replace(ENGINE, **sizes))
    assert_same_bits(other.compute([100, 77, 1, 100, 22], seed=0), reference)
    assert_same_bits(other.compute(random_chunks(np.random.default_rng(1), len(TOKENS), 30), seed=1), reference)


def test_the_window_and_its_layers_show_in_the_logits():
    """The comparisons above are not of a model that ignores its windows."""
    expected = dense_logits(WINDOWED, TOKENS[:60])[-1]
    for change in ({"sliding_window": 21}, {"sliding_window": 19}, {"window_layers": (0,)}, {"window_layers": (2,)}):
        other = dense_logits(dataclasses.replace(WINDOWED, **change), TOKENS[:60])[-1]
        assert np.abs(other - expected).max() > 1e-2 * np.abs(expected).max(), change


def test_long_generation_wraps_around_the_ring_many_times():
    model, engine = windowed(7, 4, max_num_batched_tokens=6)
    ring_blocks = window_ring_blocks(model, engine)
    assert ring_blocks == 4
    runner = ModelRunner(model, engine)
    tokens, logits = list(TOKENS[:6]), []
    run = TokenSpan(tokens[:6], 0, range(64), GREEDY, [9, 2])
    while len(tokens) < 10 * ring_blocks * engine.block_size:
        output = runner.step([run])
        logits.append(np.asarray(output.logits[0]))
        tokens.append(int(output.tokens[0]))
        ring = [9, 2, 5, 0][: -(-len(tokens) // engine.block_size)]
        run = TokenSpan(tokens[-1:], len(tokens) - 1, range(64), GREEDY, ring)
    expected = dense_logits(model, tokens)[5:-1]
    assert len(set(tokens)) > 10
    np.testing.assert_allclose(np.stack(logits), expected, atol=1e-4 * np.abs(expected).max())


def attend(position, num_queries, *, score):
    """f32[num_queries] of one head, with all scores equal to `score` and a key's position as its value."""
    run = TokenSpan(TOKENS[:num_queries], position, [0] * 20, GREEDY, [4, 1, 3, 0, 2])
    inputs = jax.tree.map(jnp.asarray, pack([run], ENGINE, WINDOWED))
    positions = np.arange(max(0, position - 19), position + num_queries)
    blocks = np.array(run.window_block_ids)[positions // 16 % 5]
    cache = np.full((5, 16, 2, 1, 1), np.nan, np.float32)
    cache[blocks, positions % 16, 0] = 1.0
    cache[blocks, positions % 16, 1] = positions[:, None, None]
    q = jnp.full((len(inputs.tokens), 1, 1, 1), score)
    return np.asarray(attention.paged_attention(q, jnp.asarray(cache), inputs, window=20))[:num_queries, 0, 0, 0]


@pytest.mark.parametrize("score", [-1e30, -1e3, 0.0, 1e3, 1e30])
def test_scores_of_any_size_are_averaged_over_the_window(score):
    """Position 143 attends to the last keys of the first tile; tokens from 147 on to none of them."""
    expected = [np.arange(max(0, p - 19), p + 1).mean() for p in range(160)]
    np.testing.assert_allclose(attend(143, 17, score=score), expected[143:], rtol=1e-6)
    np.testing.assert_allclose(attend(0, 30, score=score), expected[:30], rtol=1e-6)


@pytest.mark.parametrize(
    ("position", "num_tiles"), [(0, 1), (127, 1), (128, 2), (146, 2), (147, 1), (275, 1), (274, 2)]
)
def test_only_tiles_that_hold_keys_of_the_window_are_visited(monkeypatch, position, num_tiles):
    visited = []
    accumulate = attention._accumulate

    def counted(*args):
        visited.append(1)
        return accumulate(*args)

    monkeypatch.setattr(attention, "_accumulate", counted)
    with jax.disable_jit():
        attend(position, 1, score=0.0)
    assert len(visited) == num_tiles


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("budget", [1, 3, 4, 8])
def test_a_ring_holds_what_the_largest_step_reads_and_writes(block_size, window, budget):
    model = dataclasses.replace(WINDOWED, sliding_window=window)
    engine = EngineConfig(block_size=block_size, max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=1000)
    num_blocks = {
        (start + budget - 1) // block_size - (start - window + 1) // block_size + 1 for start in range(window, 60)
    }
    assert window_ring_blocks(model, engine) == max(num_blocks)


def test_a_ring_is_no_longer_than_the_longest_request():
    assert window_ring_blocks(WINDOWED, dataclasses.replace(ENGINE, max_model_len=17)) == 2
    assert window_ring_blocks(TINY, ENGINE) == 0


def test_each_group_of_layers_has_its_blocks():
    assert WINDOWED.layer_groups == ((1,), (0, 2))
    assert [WINDOWED.window_of(i) for i in range(3)] == [20, 0, 20]
    assert num_blocks_of(WINDOWED, ENGINE) == (64, 3 * 5)
    engine = dataclasses.replace(ENGINE, num_window_blocks=6)
    assert num_blocks_of(WINDOWED, engine) == (64, 6)
    shapes = [cache.shape for cache in ModelRunner(WINDOWED, engine).kv_caches]
    assert shapes == [(n, *WINDOWED.page_shape(16)) for n in (6, 64, 6)]


def test_a_model_without_windows_packs_nothing_for_them():
    assert TINY.layer_groups == ((0, 1),)
    assert num_blocks_of(TINY, SMALL_ENGINE) == (64,)
    inputs = pack([TokenSpan([1], 0, [3], GREEDY)], SMALL_ENGINE, TINY)
    assert inputs.window_tables.size == inputs.window_write_blocks.size == 0


def test_a_ring_too_short_for_its_span_is_an_assertion():
    with pytest.raises(AssertionError, match="17"):
        pack([TokenSpan(TOKENS[:17], 0, [0, 1], GREEDY, [0])], ENGINE, WINDOWED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": -1}, "sliding_window=-1; expected at least 1, or 0 for none"),
        ({"sliding_window": 0}, r"sliding_window=0 with window_layers=\(0, 2\); expected both or neither"),
        ({"window_layers": ()}, r"sliding_window=20 with window_layers=\(\); expected both or neither"),
        ({"window_layers": (2, 0)}, r"window_layers=\(2, 0\); expected layer ids from 0 to 2, ascending, none twice"),
        ({"window_layers": (1, 1)}, r"window_layers=\(1, 1\); expected layer ids from 0 to 2"),
        ({"window_layers": (1, 3)}, r"window_layers=\(1, 3\); expected layer ids from 0 to 2"),
        ({"window_layers": (-1, 1)}, r"window_layers=\(-1, 1\); expected layer ids from 0 to 2"),
        ({"window_layers": (0, 1, 2)}, "are all the layers; expected at least one with full attention"),
    ],
)
def test_impossible_windows_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(WINDOWED, **change)


def test_too_few_window_blocks_are_refused():
    with pytest.raises(ConfigError, match="num_window_blocks=-1; expected at least 1, or 0"):
        EngineConfig(num_window_blocks=-1)
    engine = dataclasses.replace(ENGINE, num_window_blocks=4)
    assert num_blocks_of(TINY, engine) == (64,)
    for build in (num_blocks_of, ModelRunner):
        with pytest.raises(ConfigError, match=r"num_window_blocks=4 is under the 5 blocks .* set .* to at least 5"):
            build(WINDOWED, engine)
