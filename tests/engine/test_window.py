"""Layers with a sliding window: equal to a dense reference, and the same bits for every schedule and block table."""

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
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.runner import ModelRunner
from tpu_offload.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_sizes")

GREEDY = SamplingParams(max_tokens=1)
TOKENS = random_tokens(0, 300)  # three tiles of keys
# Three groups of two layers, in no order.
WINDOWED = dataclasses.replace(TINY, num_layers=6, kv_dtype="float32", sliding_window=20, window_layers=(0, 1, 3, 5))
ENGINE = EngineConfig(block_size=16, num_blocks=76, max_num_seqs=3, max_model_len=320, max_num_batched_tokens=40)
# Windows: shorter than a block, one block, not a multiple of it, past the first tile, past the sequence.
SHAPES = [(1, 16), (5, 16), (16, 16), (37, 8), (150, 16), (400, 16)]


class Lab:
    """Computes tokens in given chunks; before every step all KV outside the windows is NaN, in the null block too."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self.model, self.engine = model, engine
        self.runner = ModelRunner(model, engine)
        self.windows = model.group_windows

    def compute(self, chunks, *, seed=None, tokens=TOKENS):
        """Bits of the KV, `[layers, tokens, ...]`, and of logits and log-probability after each chunk, by position.

        With a seed, batched with random requests, which overwrite the blocks that no token can see any more.
        """
        rng = np.random.default_rng(seed)
        blocks = np.arange(1, self.engine.num_blocks + 1)
        if seed is not None:
            rng.shuffle(blocks)
        num_positions = -(-len(tokens) // self.engine.block_size)
        *tables, unused = np.split(blocks, num_positions * np.arange(1, len(self.windows) + 1))
        kv, outputs, start = [], {}, 0
        self._put([np.full(cache.shape, np.nan, cache.dtype) for cache in self.runner.kv_caches])
        for n in chunks:
            end = start + n
            firsts = [self._first_seen(start, window) // self.engine.block_size for window in self.windows]
            used = [
                [*[NULL_BLOCK] * first, *table[first : -(-end // self.engine.block_size)].tolist()]
                for first, table in zip(firsts, tables, strict=True)
            ]
            runs = []
            if seed is not None:
                free = np.concatenate([unused, *(t[:first] for t, first in zip(tables, firsts, strict=True))])
                runs = self._neighbours(rng, rng.permutation(free), self.engine.max_num_batched_tokens - n)
            row = int(rng.integers(len(runs) + 1))
            runs.insert(row, TokenSpan(tokens[start:end], start, used, GREEDY))
            output = self.runner.step(runs)
            outputs[end] = bits(output.logits[row]), bits(output.logprobs[row])
            kv.append(self._read_and_poison(start, end, tables))
            start = end
        assert start == len(tokens)
        return np.concatenate(kv, axis=1), outputs

    def _first_seen(self, position, window):
        """The first token that one at `position` attends to."""
        return max(0, position - window + 1) if window else 0

    def _neighbours(self, rng, blocks, budget):
        """Another request in the middle of its generation, whose past KV is NaN."""
        n = int(rng.integers(budget + 1))
        if n == 0:
            return []
        tokens = rng.integers(0, self.model.vocab_size, n).tolist()
        position = int(rng.integers(self.engine.max_model_len - n))
        # The remaining blocks, repeated: its own KV may be garbage.
        table = np.resize(blocks, self.engine.max_model_len // self.engine.block_size).tolist()
        return [TokenSpan(tokens, position, [table] * len(self.windows), GREEDY)]

    def _read_and_poison(self, start, end, tables):
        """Returns the chunk's KV as f32 bits; sets all KV that token `end` does not attend to to NaN."""
        caches = [np.asarray(cache) for cache in self.runner.kv_caches]
        kept = [np.full_like(cache, np.nan) for cache in caches]
        read = {}
        for layers, window, table in zip(self.model.layer_groups, self.windows, tables, strict=True):
            chunk, seen = np.arange(start, end), np.arange(self._first_seen(end, window), end)
            for cache, keep, layer in zip(caches, kept, layers, strict=True):
                read[layer] = cache[table[chunk // self.engine.block_size], chunk % self.engine.block_size]
                places = table[seen // self.engine.block_size], seen % self.engine.block_size
                keep[places] = cache[places]
        self._put(kept)
        return bits(np.stack([read[layer] for layer in range(self.model.num_layers)]))

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
    sizes = {"block_size": block_size, "num_blocks": 4 * -(-len(TOKENS) // block_size)} | sizes
    return dataclasses.replace(WINDOWED, sliding_window=window), dataclasses.replace(ENGINE, **sizes)


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


@pytest.mark.wide
def test_other_block_sizes_and_budgets_change_no_bits():
    """At the widths of the default model, because XLA's matrix multiplication depends on them."""
    wide = dataclasses.replace(ModelConfig(), num_layers=2, sliding_window=37, window_layers=(0,))
    reference = Lab(wide, ENGINE).compute([1] * len(TOKENS))
    sizes: dict[str, Any] = {"block_size": 8, "num_blocks": 90, "max_num_batched_tokens": 100, "max_num_seqs": 5}
    other = Lab(wide, dataclasses.replace(ENGINE, **sizes))
    assert_same_bits(other.compute([100, 77, 1, 100, 22], seed=0), reference)
    assert_same_bits(other.compute(random_chunks(np.random.default_rng(1), len(TOKENS), 30), seed=1), reference)


def test_the_window_and_its_layers_show_in_the_logits():
    """The comparisons above are not of a model that ignores its windows."""
    expected = dense_logits(WINDOWED, TOKENS[:60])[-1]
    for change in ({"sliding_window": 21}, {"sliding_window": 19}, {"window_layers": (0, 1, 3, 4)}):
        other = dense_logits(dataclasses.replace(WINDOWED, **change), TOKENS[:60])[-1]
        assert np.abs(other - expected).max() > 1e-2 * np.abs(expected).max(), change


def test_long_generation_in_few_blocks():
    """A window's blocks are reused in turn, as the allocator does for a request alone."""
    model, engine = windowed(7, 4, max_num_batched_tokens=6)
    model = dataclasses.replace(model, num_layers=2, window_layers=(1,))
    runner = ModelRunner(model, engine)
    tokens, logits = list(TOKENS[:6]), []
    full, turns = range(50, 100), [9, 2, 5]
    run = TokenSpan(tokens[:6], 0, [full, [9, 2]], GREEDY)
    while len(tokens) < 120:
        output = runner.step([run])
        logits.append(np.asarray(output.logits[0]))
        tokens.append(int(output.tokens[0]))
        first = max(0, len(tokens) - 1 - 6) // 4
        window = [NULL_BLOCK] * first + [turns[i % 3] for i in range(first, -(-len(tokens) // 4))]
        assert len(set(window[first:])) == len(window[first:])
        run = TokenSpan(tokens[-1:], len(tokens) - 1, [full, window], GREEDY)
    expected = dense_logits(model, tokens)[5:-1]
    assert len(set(tokens)) > 10
    np.testing.assert_allclose(np.stack(logits), expected, atol=1e-4 * np.abs(expected).max())


def attend(position, num_queries, *, score):
    """f32[num_queries] of one head, with all scores equal to `score` and a key's position as its value."""
    table = np.arange(1, 21)[::-1]
    positions = np.arange(max(0, position - 19), position + num_queries)
    table = np.where(np.isin(np.arange(20), positions // 16), table, NULL_BLOCK)
    run = TokenSpan(TOKENS[:num_queries], position, [[9] * 20, table.tolist(), [8] * 20], GREEDY)
    inputs = jax.tree.map(jnp.asarray, pack([run], ENGINE, WINDOWED))
    cache = np.full((21, 16, 2, 1, 1), np.nan, np.float32)
    cache[table[positions // 16], positions % 16, 0] = 1.0
    cache[table[positions // 16], positions % 16, 1] = positions[:, None, None]
    q = jnp.full((len(inputs.tokens), 1, 1, 1), score)
    attended = attention.paged_attention(q, jnp.asarray(cache), inputs, group_id=1, window=20)
    return np.asarray(attended)[:num_queries, 0, 0, 0]


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


def test_layer_groups_share_the_arrays():
    assert WINDOWED.layer_groups == ((2, 4), (0, 3), (1, 5))
    assert WINDOWED.group_windows == (0, 20, 20)
    shapes = [cache.shape for cache in ModelRunner(WINDOWED, ENGINE).kv_caches]
    assert shapes == [(1 + ENGINE.num_blocks, *WINDOWED.page_shape(16))] * 2


def test_a_model_without_windows_is_one_group():
    assert (TINY.layer_groups, TINY.group_windows) == (((0, 1),), (0,))
    inputs = pack([TokenSpan([1], 0, [[3]], GREEDY)], SMALL_ENGINE, TINY)
    assert inputs.block_tables.shape == (1, SMALL_ENGINE.max_num_seqs, 32)


def test_a_token_without_a_block_is_an_assertion():
    for tables in ([[1, 2], [1], [1, 2]], [[1, 2], [1, NULL_BLOCK], [1, 2]]):
        with pytest.raises(AssertionError, match="a token has no block"):
            pack([TokenSpan(TOKENS[:17], 0, tables, GREEDY)], ENGINE, WINDOWED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": -1}, "sliding_window=-1; expected at least 1, or 0 for none"),
        ({"sliding_window": 0}, r"sliding_window=0 with window_layers=\(0, 1, 3, 5\); expected both or neither"),
        ({"window_layers": ()}, r"sliding_window=20 with window_layers=\(\); expected both or neither"),
        ({"window_layers": (2, 0)}, r"window_layers=\(2, 0\); expected layer ids from 0 to 5, ascending, none twice"),
        ({"window_layers": (1, 1)}, r"window_layers=\(1, 1\); expected layer ids from 0 to 5"),
        ({"window_layers": (1, 6)}, r"window_layers=\(1, 6\); expected layer ids from 0 to 5"),
        ({"window_layers": (-1, 1)}, r"window_layers=\(-1, 1\); expected layer ids from 0 to 5"),
        ({"window_layers": tuple(range(6))}, "are all the layers; expected at least one with full attention"),
        ({"window_layers": (1,)}, "1 window_layers beside 5 layers .* expected a multiple of 5 window_layers"),
        ({"num_layers": 7}, "4 window_layers beside 3 layers with full .* groups of 3, which share arrays"),
    ],
)
def test_impossible_windows_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(WINDOWED, **change)
