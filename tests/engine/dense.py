"""Reference of the model in numpy: float64, one whole sequence at a time, without blocks or tiles."""

import numpy as np

from tests.engine.helpers import TINY
from tpu_offload.engine import ModelConfig
from tpu_offload.engine.model import Decoder


def norm(x, module):
    scale = np.asarray(module.scale[...], np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.norm_eps) * scale


def linear(x, module):
    return x @ np.asarray(module.kernel[...], np.float64)


def rotate(x, theta):
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def silu(x):
    return x / (1 + np.exp(-x))


def rounded(x, dtype):
    return x.astype(np.float32).astype(dtype).astype(np.float64)


def normalized(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def delta_net(config: ModelConfig, mixer, x):
    """A gated delta net in the form of the paper: a matrix product a token, with the state transposed."""
    n, heads, dim = len(x), config.num_state_heads, config.state_head_dim
    inputs = rounded(linear(x, mixer.qkv), config.kv_dtype)
    kernel = np.asarray(mixer.kernel[...], np.float64)
    padded = np.concatenate([np.zeros((len(kernel) - 1, inputs.shape[1])), inputs])
    mixed = silu(sum(kernel[i] * padded[i : i + n] for i in range(len(kernel))))
    q, k, v = np.moveaxis(mixed.reshape(n, 3, heads, dim), 1, 0)
    q, k = normalized(q) / np.sqrt(dim), normalized(k)
    alpha = np.exp(-np.log1p(np.exp(linear(x, mixer.decay) + np.asarray(mixer.decay_bias[...], np.float64))))
    beta = 1 / (1 + np.exp(-linear(x, mixer.beta)))
    out = np.empty((n, heads, dim))
    for h in range(heads):
        state = np.zeros((dim, dim))
        for t in range(n):
            erase = np.eye(dim) - beta[t, h] * np.outer(k[t, h], k[t, h])
            state = alpha[t, h] * state @ erase + beta[t, h] * np.outer(v[t, h], k[t, h])
            out[t, h] = state @ q[t, h]
    gated = norm(out, mixer.norm) * silu(linear(x, mixer.gate).reshape(n, heads, dim))
    return linear(gated.reshape(n, -1), mixer.o)


def attention(config: ModelConfig, layer, y, mask):
    n, heads, kv_heads, dim = len(y), config.num_heads, config.num_kv_heads, config.head_dim
    q = rotate(linear(y, layer.q).reshape(n, heads, dim), config.rope_theta)
    k = rotate(linear(y, layer.k).reshape(n, kv_heads, dim), config.rope_theta)
    v = linear(y, layer.v).reshape(n, kv_heads, dim)
    k, v = (rounded(a, config.kv_dtype) for a in (k, v))
    out = np.empty((n, heads, dim))
    for h in range(heads):
        scores = q[:, h] @ k[:, h // config.group_size].T * config.attention_gain / np.sqrt(dim)
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, h // config.group_size]
    return linear(out.reshape(n, -1), layer.o)


def dense_logits(config: ModelConfig, tokens) -> np.ndarray:
    """f64[tokens, vocab_size]: every position's logits, with K and V rounded to the cache's dtype."""
    model = Decoder(config)
    n = len(tokens)
    x = np.asarray(model.embed.embedding[...], np.float64)[list(tokens)]
    causal = np.tril(np.ones((n, n), bool))
    for i, layer in enumerate(model.layers):
        if i in config.state_layers:
            x = x + delta_net(config, layer.mixer, norm(x, layer.mixer_norm))
        else:
            mask = causal
            if i in config.window_layers:
                mask = causal & ~np.tril(np.ones((n, n), bool), -config.sliding_window)
            x = x + attention(config, layer, norm(x, layer.attention_norm), mask)
        y = norm(x, layer.mlp.norm)
        x = x + linear(silu(linear(y, layer.mlp.gate)) * linear(y, layer.mlp.up), layer.mlp.down)
    return linear(norm(x, model.norm), model.head)
