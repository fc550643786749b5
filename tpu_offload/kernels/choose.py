"""Chooses the copy path of each direction; nothing else does.

Saves and loads are chosen independently: staged saves with direct loads are as valid as any other pair. Directions
with the same path share one copier with its programs and buffers.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.copy_profile import CopyProfile
from tpu_offload.errors import ConfigError
from tpu_offload.kernels.copier import ArenaView, Copier
from tpu_offload.kernels.direct import DirectCopier, direct_spec
from tpu_offload.kernels.spec import TransferSpec
from tpu_offload.kernels.staged import StagedCopier
from tpu_offload.types import Direction

_logger = logging.getLogger(__name__)

Paths = Mapping[Direction, CopyPath]


def choose_paths(config: OffloadConfig, spec: TransferSpec, *, fused: bool) -> dict[Direction, CopyPath]:
    """Resolves settings, copy profile and engine support to one path per direction, never `auto`.

    Args:
      config: the settings.
      spec: the caches; selects the entry of the profile.
      fused: whether the engine runs fused copies in its own step.
    Raises:
      ConfigError: the engine does not support the path, or the profile cannot be used.
    """
    # Hosts that share a model must run the same step, but the copies in it could differ: one host may have lost a
    # segment of its pool. So fused copies are for a single host.
    spans_hosts = not spec.cache_sharding.is_fully_addressable
    offered = [CopyPath.DIRECT, CopyPath.STAGED, *([CopyPath.FUSED] if fused and not spans_hosts else [])]
    why_not = "the KV caches span hosts" if fused else "this engine does not run the fused copies in its step"
    if spec.num_ranks > 1:
        offered, why_not = [CopyPath.DIRECT], f"the KV caches are split over {spec.num_ranks} data-parallel ranks"
    wanted = {direction: config.path_for(direction) for direction in Direction}
    chosen = dict(wanted)
    if CopyPath.AUTO in wanted.values():
        assert config.copy_profile is not None, "the config refuses auto without a profile"
        profile = CopyProfile.read(config.copy_profile)
        device: Any = next(iter(spec.cache_sharding.device_set))
        for direction in [d for d in Direction if wanted[d] is CopyPath.AUTO]:
            chosen[direction] = profile.choose(
                direction,
                device_kind=device.device_kind,
                num_layers=spec.num_layers,
                page_nbytes=spec.block_nbytes_per_device // spec.num_layers,
                offered=offered,
            )
            _logger.info(
                "%ss use the %s path, according to the profile %s",
                direction.value,
                chosen[direction].value,
                config.copy_profile,
            )
    for direction, path in chosen.items():
        if path not in offered:
            raise ConfigError(
                f"TPU_OFFLOAD_{direction.name}_PATH={path.value}: {why_not}; set it to "
                f"{', '.join(p.value for p in offered)} or auto"
            )
    return chosen


def make_copiers(
    paths: Paths,
    spec: TransferSpec,
    arena: ArenaView,
    *,
    allocate: Callable[[jax.ShapeDtypeStruct], jax.Array],
    buckets: tuple[int, ...] = (),
) -> dict[Direction, Copier]:
    """Makes the copier of each direction, for copies outside the engine's step.

    Args:
      paths: the result of `choose_paths`.
      spec: what is copied.
      arena: the segments.
      allocate: allocates zeros in pinned host memory that can be donated.
      buckets: staging array sizes, as in `usable_buckets`.
    """

    def make(path: CopyPath) -> Copier:
        directions = frozenset(direction for direction in Direction if separate[direction] is path)
        if path is CopyPath.STAGED:
            return StagedCopier(spec, arena, allocate=allocate, buckets=buckets, directions=directions)
        return DirectCopier(direct_spec(spec), arena, directions=directions)

    # Copies that do not fit into the engine's step, or come when no step runs, use the direct path.
    separate = {d: CopyPath.DIRECT if path is CopyPath.FUSED else path for d, path in paths.items()}
    copiers = {path: make(path) for path in dict.fromkeys(separate.values())}
    return {direction: copiers[path] for direction, path in separate.items()}
