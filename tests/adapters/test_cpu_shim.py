"""The jnp stand-ins for the kernels of gated delta nets and of latent attention, compared with slow references."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.vllm_cpu.cpu_shim import fused_conv1d_gdn, mla_ragged_paged_attention

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 8, 16, 4
WIDTH = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
ROWS = 12  # of the state arrays
SIZES = {"n_kq": KEY_HEADS, "n_v": VALUE_HEADS, "d_k": KEY_DIM, "d_v": VALUE_DIM, "kernel_size": TAPS}


def _sequence(qkv, b, a, weights, state):
    """The recurrence of the Gated Delta Networks paper in float64, as it is written: with matrices, head by head.

    S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T, o_t = S_t q_t.

    References:
      Yang, Kautz, Hatamizadeh: Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024, equation 10.
    """
    past, before = state
    history, out = np.concatenate([past, qkv]), []
    matrices = [before[head].T for head in range(VALUE_HEADS)]
    for t in range(len(qkv)):
        mixed = np.array([history[t : t + TAPS, c] @ weights["taps"][c] for c in range(WIDTH)]) + weights["bias"]
        mixed = mixed / (1 + np.exp(-mixed))
        queries, keys = mixed[: 2 * KEY_HEADS * KEY_DIM].reshape(2, KEY_HEADS, KEY_DIM)
        values = mixed[2 * KEY_HEADS * KEY_DIM :].reshape(VALUE_HEADS, VALUE_DIM)
        row = []
        for head in range(VALUE_HEADS):
            shared = head * KEY_HEADS // VALUE_HEADS
            q, k = (x[shared] / np.sqrt(x[shared] @ x[shared] + 1e-6) for x in (queries, keys))
            alpha = np.exp(-np.exp(weights["a_log"][head]) * np.log1p(np.exp(a[t, head] + weights["dt_bias"][head])))
            beta = 1 / (1 + np.exp(-b[t, head]))
            matrices[head] = matrices[head] @ (alpha * (np.eye(KEY_DIM) - beta * np.outer(k, k)))
            matrices[head] = matrices[head] + beta * np.outer(values[head], k)
            row.append(matrices[head] @ q / np.sqrt(KEY_DIM))
        out.append(np.concatenate(row))
    return np.array(out), (history[len(qkv) :], np.stack([m.T for m in matrices]))


class Batch:
    """Sequences of these (computed tokens, new tokens), with padding behind them, and state arrays full of NaN."""

    def __init__(self, lengths, seed=0, num_requests=6, num_tokens=40):
        random = np.random.default_rng(seed)
        self.lengths, self.weights = lengths, {
            "taps": random.normal(size=(WIDTH, TAPS)), "bias": random.normal(size=WIDTH),
            "a_log": random.normal(size=VALUE_HEADS), "dt_bias": random.normal(size=VALUE_HEADS),
        }  # fmt: skip
        self.qkv = random.normal(size=(num_tokens, WIDTH))
        self.b, self.a = random.normal(size=(2, num_tokens, VALUE_HEADS))
        rows = random.permutation(np.arange(1, ROWS))
        self.reads, self.writes = rows[: len(lengths)], rows[-len(lengths) :]
        self.writes[0] = self.reads[0]  # as between two boundaries of blocks
        self.conv = np.full((ROWS, TAPS - 1, WIDTH), np.nan)
        self.states = np.full((ROWS, VALUE_HEADS, KEY_DIM, VALUE_DIM), np.nan)
        for (computed, _), row in zip(lengths, self.reads, strict=True):
            if computed:
                self.conv[row] = random.normal(size=self.conv[row].shape)
                self.states[row] = random.normal(size=self.states[row].shape)
        self._num_requests = num_requests

    def run(self, dtype=jnp.float32):
        def padded(values, fill=0):
            return jnp.array([*values, *[fill] * (self._num_requests - len(self.lengths))], jnp.int32)

        new = [count for _, count in self.lengths]
        starts = jnp.array(np.cumsum([0, *new, *[0] * (self._num_requests - len(new))]), jnp.int32)
        num_decodes = sum(1 for computed, count in self.lengths if computed and count == 1)
        weights: dict[str, Any] = {name: jnp.array(x, jnp.float32) for name, x in self.weights.items()}
        (conv, states), out = jax.jit(fused_conv1d_gdn, static_argnames=tuple(SIZES))(
            jnp.array(self.qkv, dtype), jnp.array(self.b, dtype), jnp.array(self.a, dtype), jnp.array(self.conv, dtype),
            jnp.array(self.states, jnp.float32), weights["taps"][:, None], weights["bias"], weights["a_log"],
            weights["dt_bias"], starts, padded(self.writes),
            jnp.array([num_decodes, num_decodes, len(self.lengths)], jnp.int32),
            padded([computed + count for computed, count in self.lengths]), padded(self.reads), **SIZES,
        )  # fmt: skip
        assert (out.dtype, conv.dtype, states.dtype) == (dtype, dtype, jnp.float32)
        return np.asarray(out, np.float64), np.asarray(conv, np.float64), np.asarray(states)

    def expected(self):
        out, conv, states, start = np.zeros((len(self.qkv), VALUE_HEADS * VALUE_DIM)), self.conv, self.states, 0
        conv, states = conv.copy(), states.copy()
        for (computed, count), read, write in zip(self.lengths, self.reads, self.writes, strict=True):
            state = (self.conv[read], self.states[read])
            if not computed:
                state = (np.zeros_like(state[0]), np.zeros_like(state[1]))
            at = slice(start, start + count)
            out[at], (conv[write], states[write]) = _sequence(self.qkv[at], self.b[at], self.a[at], self.weights, state)
            start += count
        return out, conv, states


@pytest.mark.parametrize(
    "lengths",
    [[(0, 7)], [(9, 1)], [(0, 1), (0, 2)], [(5, 1), (3, 1), (16, 9), (0, 20)], [(1, 1), (0, 30), (32, 2)]],
    ids=["prompt", "decode", "short prompts", "all kinds", "more"],
)
def test_equal_to_the_reference(lengths):
    batch = Batch(lengths)
    for got, expected in zip(batch.run(), batch.expected(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)  # NaN only in the same places


def test_equal_to_the_reference_of_tpu_inference():
    """Which has no convolution, and reads and writes one state."""
    from tpu_inference.kernels.gdn.reference.ragged_gated_delta_rule_ref import ragged_gated_delta_rule

    batch = Batch([(4, 1), (9, 7), (0, 12)])
    batch.reads = batch.writes
    batch.weights["taps"][:], batch.weights["bias"][:] = np.eye(TAPS)[-1], 0
    for row, (computed, _) in zip(batch.writes, batch.lengths, strict=True):
        batch.conv[row] = 0
        batch.states[row] = np.random.default_rng(row).normal(size=batch.states[row].shape) if computed else np.nan
    batch.states[0] = 0  # it also writes the null state
    out, _, states = batch.run()
    num_tokens = sum(count for _, count in batch.lengths)
    inputs = {name: jnp.array(x, jnp.float32) for name, x in batch.weights.items()}
    known, expected = ragged_gated_delta_rule(
        *(jnp.array(x, jnp.float32) for x in (batch.qkv, batch.b, batch.a, batch.states)),
        inputs["a_log"], inputs["dt_bias"], jnp.array([0, 1, 8, 20]), jnp.array(batch.writes),
        jnp.array([1, 1, 3]), jnp.array([True, True, False]),
        n_kq=KEY_HEADS, n_v=VALUE_HEADS, d_k=KEY_DIM, d_v=VALUE_DIM,
    )  # fmt: skip
    np.testing.assert_allclose(out[:num_tokens], expected[:num_tokens], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states[batch.writes], known[batch.writes], rtol=1e-4, atol=1e-5)


def test_a_result_does_not_depend_on_the_rest_of_the_batch():
    """Nor on how many steps a prompt takes: bit for bit, with inputs in bfloat16, as the engine has them."""
    whole, parts = Batch([(0, 24)]), Batch([(0, 9), (9, 15)])
    parts.reads = np.array([parts.reads[0], parts.writes[0]])  # the second goes on where the first ended
    out, conv, states = whole.run(jnp.bfloat16)
    got = parts.run(jnp.bfloat16)
    np.testing.assert_array_equal(got[0], out)
    np.testing.assert_array_equal(got[1][parts.writes[1]], conv[whole.writes[0]])
    np.testing.assert_array_equal(got[2][parts.writes[1]], states[whole.writes[0]])


class LatentBatch:
    """Sequences of these (computed tokens, new tokens), with padding behind them, and a cache full of NaN elsewhere."""

    HEADS, LATENT, ROTARY, SCALE = 3, 24, 8, 0.3

    def __init__(self, lengths, *, turned=False, packing=4, seed=0, num_tokens=160):
        random = np.random.default_rng(seed)
        self.lengths, self.turned, self.packing = lengths, turned, packing
        self.page_size = 128 if turned else 8
        self.latent_queries = random.normal(size=(self.HEADS, num_tokens, self.LATENT))
        self.rotary_queries = random.normal(size=(num_tokens, self.HEADS, self.ROTARY))
        self.latents = random.normal(size=(num_tokens, self.LATENT))
        self.keys = random.normal(size=(num_tokens, self.ROTARY))
        self.past = [(random.normal(size=(n, self.LATENT)), random.normal(size=(n, self.ROTARY))) for n, _ in lengths]
        self.pages_per_seq = -(-max(map(sum, lengths)) // self.page_size) + 1
        self.pages = random.permutation(np.arange(1, 1 + (len(lengths) + 2) * self.pages_per_seq))
        self.pages = self.pages[: len(lengths) * self.pages_per_seq].reshape(len(lengths), -1)
        self.num_pages = 1 + (len(lengths) + 2) * self.pages_per_seq

    def rows(self, count):
        """Of each sequence the latents and keys of its first tokens, as many as `count` says of its lengths."""
        starts = np.cumsum([0, *(new for _, new in self.lengths)])
        for (computed, new), (latents, keys), start in zip(self.lengths, self.past, starts, strict=False):
            at = slice(start, start + count(computed, new) - computed)
            yield np.concatenate([latents, self.latents[at]]), np.concatenate([keys, self.keys[at]])

    def cache(self, count):
        """tpu-inference's cache of these tokens; the positions behind them are 0 in a sequence's pages."""
        flat = np.full((self.num_pages, self.page_size, 128 + (self.ROTARY if self.turned else 128)), np.nan)
        flat[self.pages] = 0
        for pages, (latents, keys) in zip(self.pages, self.rows(count), strict=True):
            for position, (latent, key) in enumerate(zip(latents, keys, strict=True)):
                row = flat[pages[position // self.page_size], position % self.page_size]
                row[:] = 0
                row[: self.LATENT], row[128 : 128 + self.ROTARY] = latent, key
        if self.turned:
            return flat.swapaxes(1, 2)
        return flat.reshape(self.num_pages, -1, self.packing, 256)

    def run(self, dtype=jnp.float32):
        num_requests = len(self.lengths) + 2
        new = [count for _, count in self.lengths]
        pages = np.zeros((num_requests, self.pages_per_seq), np.int32)
        pages[: len(self.lengths)] = self.pages
        out, cache = jax.jit(
            mla_ragged_paged_attention, static_argnames=("sm_scale", "transpose_kv_cache", "num_kv_pages_per_block")
        )(
            *(jnp.array(x, dtype) for x in (self.latent_queries, self.rotary_queries, self.latents, self.keys)),
            jnp.array(self.cache(lambda computed, new: computed), dtype),
            jnp.array([*map(sum, self.lengths), 0, 0], jnp.int32),
            jnp.array(pages.reshape(-1)),
            jnp.array(np.cumsum([0, *new, 0, 0]), jnp.int32),
            jnp.array([0, 0, len(new)], jnp.int32),
            sm_scale=self.SCALE, transpose_kv_cache=self.turned, num_kv_pages_per_block=1,
        )  # fmt: skip
        assert (out.dtype, out.shape, cache.dtype) == (dtype, self.latent_queries.shape, dtype)
        return np.asarray(out, np.float64), np.asarray(cache, np.float64)

    def expected(self):
        """Softmax over all tokens until a query's own, in float64, token by token and head by head."""
        out, token = np.zeros(self.latent_queries.shape), 0
        for (computed, new), (latents, keys) in zip(self.lengths, self.rows(lambda c, n: c + n), strict=True):
            for position in range(computed, computed + new):
                past = slice(0, position + 1)
                for head in range(self.HEADS):
                    scores = latents[past] @ self.latent_queries[head, token]
                    scores = self.SCALE * (scores + keys[past] @ self.rotary_queries[token, head])
                    weights = np.exp(scores - scores.max())
                    out[head, token] = weights / weights.sum() @ latents[past]
                token += 1
        return out, self.cache(lambda computed, new: computed + new)


@pytest.mark.parametrize("turned", [False, True], ids=["packed", "turned"])
@pytest.mark.parametrize(
    "lengths",
    [[(0, 7)], [(9, 1)], [(0, 8), (8, 1)], [(5, 1), (3, 1), (16, 9), (0, 20)], [(130, 1), (0, 70), (32, 60)]],
    ids=["prompt", "decode", "ends of pages", "all kinds", "several tiles"],
)
def test_latent_attention_is_equal_to_the_reference(lengths, turned):
    batch = LatentBatch(lengths, turned=turned)
    for got, expected in zip(batch.run(), batch.expected(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_latent_attention_is_equal_to_the_reference_of_tpu_inference():
    from tpu_inference.kernels.mla.v1.kernel import ref_mla_ragged_paged_attention

    batch = LatentBatch([(4, 1), (9, 7), (0, 12)], packing=1, num_tokens=20)
    out, cache = batch.run()
    inputs = (batch.latent_queries.swapaxes(0, 1), batch.rotary_queries, batch.latents, batch.keys)
    expected, expected_cache = ref_mla_ragged_paged_attention(
        *(jnp.array(x, jnp.float32) for x in inputs),
        jnp.array(batch.cache(lambda computed, new: computed), jnp.float32),
        jnp.array([5, 16, 12]), jnp.array(batch.pages.reshape(-1), jnp.int32), jnp.array([0, 1, 8, 20]),
        jnp.array([0, 0, 3]), sm_scale=batch.SCALE,
    )  # fmt: skip
    np.testing.assert_allclose(out.swapaxes(0, 1), expected[..., : batch.LATENT], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache, expected_cache)


def test_latent_attention_of_a_token_does_not_depend_on_the_rest_of_the_batch():
    """Bit for bit, with inputs in bfloat16: a prompt in two steps, the second beside another sequence."""
    whole, part = LatentBatch([(0, 90)]), LatentBatch([(0, 50), (30, 60)], seed=1)
    out, cache = whole.run(jnp.bfloat16)
    part.past[1] = whole.latents[:30], whole.keys[:30]
    for name in ("latent_queries", "rotary_queries", "latents", "keys"):
        own, other = getattr(part, name), getattr(whole, name)
        if name == "latent_queries":
            own, other = own.swapaxes(0, 1), other.swapaxes(0, 1)
        own[50:110] = other[30:90]
    got, got_cache = part.run(jnp.bfloat16)
    np.testing.assert_array_equal(got[:, 50:110], out[:, 30:90])
    np.testing.assert_array_equal(got_cache[part.pages[1, :11]], cache[whole.pages[0, :11]])
