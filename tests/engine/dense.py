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


def dense_logits(config: ModelConfig, tokens) -> np.ndarray:
    """f64[tokens, vocab_size]: every position's logits, with K and V rounded to the cache's dtype."""
    model = Decoder(config)
    n, heads, kv_heads, dim = len(tokens), config.num_heads, config.num_kv_heads, config.head_dim
    x = np.asarray(model.embed.embedding[...], np.float64)[list(tokens)]
    causal = np.tril(np.ones((n, n), bool))
    for i, layer in enumerate(model.layers):
        mask = causal
        if i in config.window_layers:
            mask = causal & ~np.tril(np.ones((n, n), bool), -config.sliding_window)
        y = norm(x, layer.attention_norm)
        q = rotate(linear(y, layer.q).reshape(n, heads, dim), config.rope_theta)
        k = rotate(linear(y, layer.k).reshape(n, kv_heads, dim), config.rope_theta)
        v = linear(y, layer.v).reshape(n, kv_heads, dim)
        k, v = (a.astype(np.float32).astype(config.kv_dtype).astype(np.float64) for a in (k, v))
        out = np.empty((n, heads, dim))
        for h in range(heads):
            scores = q[:, h] @ k[:, h // config.group_size].T * config.attention_gain / np.sqrt(dim)
            scores = np.where(mask, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, h // config.group_size]
        x = x + linear(out.reshape(n, -1), layer.o)
        y = norm(x, layer.mlp_norm)
        gate = linear(y, layer.gate)
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, layer.up), layer.down)
    return linear(norm(x, model.norm), model.head)
