"""The layout of tpu-inference's KV caches, in the library's terms."""

from typing import Any

import jax

from tpu_offload import ConfigError, KVLayout
from tpu_offload.adapters.vllm.block_tables import NULL_BLOCK
from tpu_offload.adapters.vllm.model_identity import model_identity
from tpu_offload.adapters.vllm.settings import num_stages, state_groups, windows


def describe_caches(runner: Any) -> KVLayout:
    """The layout of a runner's caches.

    Raises:
      ConfigError: KV cache groups do not share their arrays.
      LayoutError: these caches are not supported.
    """
    vllm_config, config = runner.vllm_config, runner.kv_cache_config
    all_windows, of_states = windows(config), _state_arrays(runner)
    caches = jax.tree.leaves(runner.kv_caches)
    groups: list[tuple[int, range]] = []
    if len(all_windows) > 1:
        arrays = [_places(runner, group) for group in config.kv_cache_groups]
        if max(map(len, arrays)) < len(caches) or any(own != set(range(len(own))) for own in arrays):
            raise ConfigError(
                f"tpu_offload: the layers of the KV cache groups are in the arrays {[sorted(own) for own in arrays]}; "
                f"expected groups that share the {len(caches)} arrays, from 0 on: set --disable-hybrid-kv-cache-manager"
            )
        groups = [(window, range(len(caches))) for window in all_windows]
    return KVLayout.from_caches(
        caches,
        block_size=vllm_config.cache_config.block_size,
        model=model_identity(vllm_config),
        groups=groups,
        states=of_states,
        null_block=NULL_BLOCK if groups or of_states else None,
        stage_layers=stage_layers(runner),
    )


def stage_layers(runner: Any) -> str:
    """Which layers of the model a pipeline stage has; empty without stages.

    Not from its arrays: tpu-inference gives several stages the same number of them, though they have different layers.
    """
    from vllm.distributed.utils import get_pp_indices

    config = runner.vllm_config
    num = num_stages(config)
    if num == 1:
        return ""
    num_layers = config.model_config.get_total_num_hidden_layers()
    first, end = get_pp_indices(num_layers, runner.rank, num)  # as tpu-inference and vLLM divide a model
    return f"{first} to {end - 1} of {num_layers}"


def _state_arrays(runner: Any) -> list[int]:
    """The positions of the arrays of states in the list of all arrays of a runner."""
    groups = runner.kv_cache_config.kv_cache_groups
    places = {place for i in state_groups(runner.kv_cache_config) for place in _places(runner, groups[i])}
    # A layer with a state has several arrays, in one place of the runner's list.
    caches, structure = jax.tree.flatten(runner.kv_caches)
    numbered = jax.tree.unflatten(structure, range(len(caches)))
    return jax.tree.leaves([numbered[place] for place in sorted(places)])


def _places(runner: Any, group: Any) -> set[int]:
    """The places of a KV cache group's layers in the runner's list of caches."""
    return {runner.layer_name_to_kvcache_index[name] for name in group.layer_names}
