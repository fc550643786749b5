"""Makes the storage tier of the settings: a registered name, or `module:Class`."""

import importlib

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError, OffloadError
from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.values import one_line

STORAGE_TIERS: dict[str, str] = {
    "file": "tpu_offload.storage.file:FileTier",
    "object": "tpu_offload.storage.object:ObjectTier",
    "valkey": "tpu_offload.storage.valkey:ValkeyTier",
}
"""The `module:Class` of each tier, by name; modules are imported on use."""

_SETTING = f"{ENV_PREFIX}STORAGE_TIER="


def make_tier(name: str, spec: StorageSpec) -> StorageTier:
    """Makes the tier of a registered name, or of a `module:Class`.

    Raises:
      ConfigError: the name is unknown, the module does not import, the class is not derived from `StorageTier`, is
        shared but has no `find`, or its constructor fails.
    """
    what = f"{_SETTING}{name}"
    module_name, colon, class_name = STORAGE_TIERS.get(name, name).partition(":")
    if not colon:
        known = f"one of {', '.join(STORAGE_TIERS)}, or " if STORAGE_TIERS else ""
        raise ConfigError(f"{what}: there is no storage tier of this name; expected {known}module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as e:  # the user's own module may raise anything
        raise ConfigError(
            f"{what}: {module_name} cannot be imported ({type(e).__name__}: {one_line(e)}); expected a module on the "
            "PYTHONPATH of the worker's process"
        ) from e
    if not (isinstance(found, type) and issubclass(found, StorageTier)):
        raise ConfigError(
            f"{what}: {class_name} in {module_name} is {one_line(found)}; expected a class derived from "
            "tpu_offload.storage.StorageTier"
        )
    if found.is_shared and found.find is StorageTier.find:
        raise ConfigError(f"{what}: {class_name} in {module_name} has is_shared=True and no find(); it needs one")
    try:
        return found(spec)
    except OffloadError:
        raise
    except Exception as e:
        raise ConfigError(f"{what}: it cannot be made ({type(e).__name__}: {one_line(e)}) with {one_line(spec)}") from e
