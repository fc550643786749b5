"""A Llama-shaped step over paged caches, for the compiler only: what a fused copy has to hide under.

Each layer writes the KV of whole blocks, attends to a context read from the cache by its block ids, and
has the matrix products of Llama 3 8B, split over the devices of a mesh as one does for serving.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tpu_offload.kernels import FusedCopies, FusedStep


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the step computes: `num_tokens` new tokens, which see `num_context_blocks` blocks."""

    d_model: int = 4096
    d_ff: int = 14336
    num_tokens: int = 256
    num_context_blocks: int = 32
    vocab_size: int = 32768


def step(weights: Any, kv_caches: Any, x: Any, new_blocks: Any, context: Any, segment: Any, inputs: Any) -> Any:
    """One forward pass; returns logits, caches and what `FusedCopies.finish` returns."""
    copies = FusedCopies(segment, inputs)
    num_tokens = x.shape[0]
    out = []
    for i, (cache, (wq, wkv, wo, gate, up, down)) in enumerate(zip(kv_caches, weights["layers"], strict=True)):
        page_shape = cache.shape[1:]
        kv = (x @ wkv).reshape(-1, *page_shape)
        cache = cache.at[new_blocks].set(kv.astype(cache.dtype), unique_indices=True)
        pages = cache[context].astype(x.dtype)
        keys, values = jnp.split(pages.reshape(-1, 2, wq.shape[1] // 4 // 128, 128), 2, axis=1)
        q = (x @ wq).reshape(num_tokens, keys.shape[2], 4, 128)
        scores = jax.nn.softmax(jnp.einsum("thgd,shd->hgts", q, keys[:, 0]).astype(jnp.float32))
        attended = jnp.einsum("hgts,shd->thgd", scores.astype(x.dtype), values[:, 0])
        x = x + attended.reshape(num_tokens, -1) @ wo
        x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
        x, cache = copies.after_layer(i, x, cache)
        out.append(cache)
    return x @ weights["head"], out, copies.finish()


def structs(kv_caches: Any, fused: FusedStep, *, block_size: int, sizes: Sizes = Sizes()) -> tuple[Any, ...]:
    """Arguments of `step` as shapes with shardings, for caches given as such."""
    first = kv_caches[0]
    mesh = first.sharding.mesh
    kv_width = math.prod(first.shape[1:]) // block_size

    def struct(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    d, ff = sizes.d_model, sizes.d_ff
    layer = (
        struct((d, 2 * kv_width), None, "model"),  # four query heads to a KV head
        struct((d, kv_width), None, "model"),
        struct((2 * kv_width, d), "model", None),
        struct((d, ff), None, "model"),
        struct((d, ff), None, "model"),
        struct((ff, d), "model", None),
    )
    weights = {"layers": [layer] * len(kv_caches), "head": struct((d, sizes.vocab_size), None, "model")}
    ids = [struct((n,), dtype=jnp.int32) for n in (sizes.num_tokens // block_size, sizes.num_context_blocks)]
    return (weights, kv_caches, struct((sizes.num_tokens, d)), *ids, *fused)
