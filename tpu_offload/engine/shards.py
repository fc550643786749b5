"""How the KV caches of a model are split over the devices of several hosts.

Every device computes the whole model, except attention: of that each has some heads, with their keys and values. The
bits of a head do not depend on the other heads, so the result equals that of one device. One collective a layer joins
the heads; nothing is summed over devices.

States are split too, but joined before use: a step reads one row of them for each request.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_offload import ConfigError
from tpu_offload.engine.config import ModelConfig

_AXIS = "heads"


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """The devices that a step runs on, inside the step's program.

    Attributes:
      num: number of devices; with 1 nothing is split.
    """

    num: int = 1

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an array that belongs to this device."""
        if self.num == 1:
            return x
        size = x.shape[axis] // self.num
        return lax.dynamic_slice_in_dim(x, lax.axis_index(_AXIS) * size, size, axis)

    def join(self, x: jax.Array, axis: int) -> jax.Array:
        """The whole array from the parts of all devices."""
        return x if self.num == 1 else lax.all_gather(x, _AXIS, axis=axis, tiled=True)


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """The devices in the order in which they have the heads."""
    return Mesh(devices, (_AXIS,))


def cache_specs(model_config: ModelConfig) -> list[P]:
    """How the arrays of `ModelRunner.kv_caches` are split: blocks by heads, states by channels and by heads."""
    pages = [P(None, None, _AXIS)] * model_config.num_arrays
    return [*pages, *[P(None, None, _AXIS), P(None, _AXIS)] * len(model_config.state_layers)]


def cache_shardings(model_config: ModelConfig, mesh: Mesh) -> list[NamedSharding]:
    """The same as shardings."""
    return [NamedSharding(mesh, spec) for spec in cache_specs(model_config)]


def check_shards(model_config: ModelConfig, num_devices: int) -> None:
    """Raises ConfigError unless every device gets as many heads."""
    rows = model_config.page_shape(1)[1]
    if rows % num_devices:
        raise ConfigError(
            f"num_kv_heads={model_config.num_kv_heads} of {model_config.kv_dtype} cannot be divided among "
            f"{num_devices} devices; expected a multiple of {num_devices * model_config.kv_packing // 2 or 1}"
        )
    if model_config.state_layers and model_config.num_state_heads % num_devices:
        raise ConfigError(
            f"num_state_heads={model_config.num_state_heads} cannot be divided among {num_devices} devices; expected a "
            f"multiple of {num_devices}"
        )
