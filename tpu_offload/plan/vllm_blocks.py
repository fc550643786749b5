"""How many KV blocks vLLM-TPU will have: the arithmetic of tpu-inference and vLLM 0.32, without either.

From `tpu_inference/runner/kv_cache_manager.py` and `kv_cache.py` (pages, padding, the pool of states), its
`layers/vllm/backends/flash_attn.py` (block size), `layers/common/sharding.py` (ranks), and
`vllm/v1/core/kv_cache_planning.py` (groups). `tests/adapters/test_plan.py` compares with the real ones.
"""

import dataclasses
from typing import final

from tpu_offload.errors import InputError
from tpu_offload.plan.model import LANES, AttentionLayers, ModelShape, align

_LATENT_PACKING = 32  # tokens in a row of a page of latent attention
_STATES_A_REQUEST = 8  # tpu-inference's DEFAULT_MAMBA_CACHE_MULTIPLIER
_LEAST_REQUESTS = 8  # that tpu-inference has states for
_BLOCK_ENTRIES = 1024 * 1024 // 2 // 4  # of all block tables, in the scalar memory of a TPU


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The flags of `vllm serve` that the caches depend on.

    Attributes:
      num_devices: `--tensor-parallel-size`.
      num_ranks: data-parallel ranks of the attention among them.
      max_tokens: `--max-model-len`.
      max_requests: `--max-num-seqs`, of each rank.
      step_tokens: `--max-num-batched-tokens`.
      block_size: `--block-size`.
      kv_nbytes: bytes of a cached number: 2, or 1 with `--kv-cache-dtype fp8`.
      num_batches: steps in flight: 2 with async scheduling.
      one_group: `--disable-hybrid-kv-cache-manager`: windows have KV of full length, too.
    """

    num_devices: int
    num_ranks: int
    max_tokens: int
    max_requests: int
    step_tokens: int
    block_size: int
    kv_nbytes: int
    num_batches: int = 2
    one_group: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A layer group: layers with one block table.

    Attributes:
      window: its window in tokens; 0 for full attention.
      num_layers: layers of the model in all groups with this window.
      num_groups: how many groups these make.
      layer_nbytes: bytes of a page, of one layer, over all devices; of pages of several shapes, their mean.
    """

    window: int
    num_layers: int
    num_groups: int
    layer_nbytes: float

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers of these groups."""
        return round(self.num_layers * self.layer_nbytes)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What vLLM makes of the HBM that is left for KV.

    Attributes:
      block_nbytes: bytes of a block of vLLM's pool, over all devices. Groups share the pool.
      num_blocks: blocks of the pool.
      num_tokens: tokens of requests of the greatest length that fit, which vLLM logs as the size of its KV cache.
      num_states: rows of states; 0 without.
      groups: the layer groups with KV.
    """

    block_nbytes: int
    num_blocks: int
    num_tokens: int
    num_states: int
    groups: tuple[GroupPlan, ...]


def default_block_size(model: ModelShape, *, max_tokens: int, max_requests: int) -> int:
    """The block size that tpu-inference takes unless `--block-size` is given."""
    if model.is_latent:
        return 1024
    power = 1 << (max_tokens - 1).bit_length()
    size = 16 if max_tokens > 8192 else min(256, max(16, power // 16))
    return max(size, least_block_size(max_tokens=max_tokens, max_requests=max_requests))


def least_block_size(*, max_tokens: int, max_requests: int) -> int:
    """The smallest block whose block tables fit into the scalar memory."""
    pages = max(1, _BLOCK_ENTRIES // max_requests)
    return 1 << (-(-max_tokens // pages) - 1).bit_length()


def has_several_full_groups(model: ModelShape) -> bool:
    """Whether vLLM would make several groups of the layers with full attention, which the connector does not run."""
    counts = [layers.count for layers in model.attention]
    return len(counts) == 2 and not model.ignores_windows and -(-counts[0] // _group_size(counts)) > 1


def num_attention_ranks(model: ModelShape, *, num_devices: int, kv_nbytes: int) -> int:
    """Ranks into which `enable_dp_attention` divides so many devices."""
    packing = 4 // kv_nbytes * (2 if model.attention[0].head_dim == 64 else 1)
    heads = max(1, int(2 * model.attention[0].num_kv_heads / packing))
    return max(1, num_devices // heads)


def page_nbytes(layers: AttentionLayers, serving: Serving) -> int:
    """Bytes of one block of one layer, over the devices of a rank.

    Raises:
      InputError: the heads cannot be divided over the devices.
    """
    if layers.latent_widths:
        width = sum(align(width, LANES) for width in layers.latent_widths)
        return align(serving.block_size, _LATENT_PACKING) * width * serving.kv_nbytes
    num_shards, num_heads = serving.num_devices // serving.num_ranks, layers.num_kv_heads
    many, few = max(num_heads, num_shards), min(num_heads, num_shards)
    if many % few:
        raise InputError(
            f"{num_heads} KV heads cannot be divided over {num_shards} devices; expected a --tensor-parallel so that "
            "one number divides the other"
        )
    packing = 4 // serving.kv_nbytes
    rows = many // num_shards * (1 if layers.head_dim == 64 else 2)  # with heads of 64, key and value share a row
    return serving.block_size * num_shards * align(rows, packing) * align(layers.head_dim, LANES) * serving.kv_nbytes


def plan_caches(model: ModelShape, serving: Serving, *, available_nbytes: int) -> CachePlan:
    """How vLLM divides the HBM that it has for KV.

    Args:
      model: the model.
      serving: the flags.
      available_nbytes: HBM for KV, of all devices together.
    Raises:
      InputError: one request of the greatest length does not fit, or the heads cannot be divided.
    """
    groups = _groups(model, serving)
    if model.states is not None:
        return _with_states(model, serving, groups, available_nbytes)
    # Groups share their arrays: a block of the pool is as wide as one group.
    block_nbytes = round(_group_size([group.num_layers for group in groups]) * groups[0].layer_nbytes)
    num_blocks = available_nbytes // block_nbytes // serving.num_ranks * serving.num_ranks
    needed = _blocks_a_request(groups, serving)
    if num_blocks // serving.num_ranks - 1 < needed:
        raise InputError(
            f"{available_nbytes / 2**30:.1f} GiB of HBM for KV are {num_blocks} blocks, and one request of "
            f"{serving.max_tokens} tokens needs {needed} of a rank: lower --max-model-len or add devices"
        )
    return CachePlan(
        block_nbytes=block_nbytes,
        num_blocks=num_blocks,
        num_tokens=int(num_blocks / needed * serving.max_tokens),
        num_states=0,
        groups=groups,
    )


def _with_states(
    model: ModelShape, serving: Serving, groups: tuple[GroupPlan, ...], available_nbytes: int
) -> CachePlan:
    """A pool of blocks and one of states, both out of the same HBM."""
    assert model.states is not None, "a model with states"
    ranks = serving.num_ranks
    block_nbytes, state_nbytes = groups[0].block_nbytes, model.states.nbytes
    blocks_a_request = -(-serving.max_tokens // serving.block_size)
    num_requests = max(_LEAST_REQUESTS, serving.max_requests * ranks)
    num_states = align(num_requests * _STATES_A_REQUEST + 1, ranks)
    num_blocks = _blocks_beside(num_states, available_nbytes, state_nbytes, block_nbytes, ranks)
    least = align(num_requests * 2 + 1, ranks)
    if num_states > least and num_blocks // blocks_a_request < num_states // _STATES_A_REQUEST:
        request_nbytes = blocks_a_request * block_nbytes + _STATES_A_REQUEST * state_nbytes
        servable = min(num_requests, available_nbytes // request_nbytes)
        num_states = max(least, align(servable * _STATES_A_REQUEST + 1, ranks))
        num_blocks = _blocks_beside(num_states, available_nbytes, state_nbytes, block_nbytes, ranks)
    if num_blocks // ranks - 1 < blocks_a_request:
        raise InputError(
            f"{available_nbytes / 2**30:.1f} GiB of HBM for KV hold {num_states} states and {num_blocks} blocks, and "
            f"one request of {serving.max_tokens} tokens needs {blocks_a_request} of a rank: lower --max-num-seqs or "
            "--max-model-len, or add devices"
        )
    # vLLM counts the two rows that each group of states needs as blocks.
    num_groups = -(-model.states.count // _group_size([model.states.count, groups[0].num_layers]))
    needed = blocks_a_request + 2 * num_groups
    return CachePlan(
        block_nbytes=block_nbytes,
        num_blocks=num_blocks,
        num_tokens=int(num_blocks / needed * serving.max_tokens),
        num_states=num_states,
        groups=groups,
    )


def _blocks_beside(num_states: int, available: int, state_nbytes: int, block_nbytes: int, ranks: int) -> int:
    return max(0, available - num_states * state_nbytes) // block_nbytes // ranks * ranks


def _groups(model: ModelShape, serving: Serving) -> tuple[GroupPlan, ...]:
    """The layer groups with KV, full attention first."""
    by_kind = [(layers, page_nbytes(layers, serving)) for layers in model.attention]
    is_one = model.ignores_windows or serving.one_group
    if len(by_kind) == 1 or is_one or len({nbytes for _, nbytes in by_kind}) > 1:
        # One group. tpu-inference gives windows KV of full length where pages have several shapes.
        num_layers = sum(layers.count for layers, _ in by_kind)
        nbytes = sum(layers.count * nbytes for layers, nbytes in by_kind) / num_layers
        return (GroupPlan(window=0, num_layers=num_layers, num_groups=1, layer_nbytes=nbytes),)
    size = _group_size([layers.count for layers, _ in by_kind])
    return tuple(
        GroupPlan(
            window=layers.window,
            num_layers=layers.count,
            num_groups=-(-layers.count // size),
            layer_nbytes=nbytes,
        )
        for layers, nbytes in by_kind
    )


def _group_size(counts: list[int]) -> int:
    """vLLM's rule: the fewest layers of a kind, but the most of any where that pads little."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _blocks_a_request(groups: tuple[GroupPlan, ...], serving: Serving) -> int:
    """Blocks that a request of the greatest length holds at a time, in all groups."""
    size, needed = serving.block_size, 0
    for group in groups:
        if group.window:
            tokens = min(group.window - 1 + serving.num_batches * serving.step_tokens, serving.max_tokens)
            needed += group.num_groups * (-(-tokens // size) + 1)
        else:
            needed += group.num_groups * -(-serving.max_tokens // size)
    return needed
