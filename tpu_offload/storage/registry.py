"""Makes the storage tier of the settings: a registered name, or `module:Class`."""

import importlib

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError, OffloadError
from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.storage.inspection import StoreInspector
from tpu_offload.values import one_line

STORAGE_TIERS: dict[str, str] = {
    "file": "tpu_offload.storage.file:FileTier",
    "object": "tpu_offload.storage.object:ObjectTier",
    "valkey": "tpu_offload.storage.valkey:ValkeyTier",
}
"""The `module:Class` of each tier, by name; modules are imported on use."""

INSPECTORS: dict[str, tuple[str, str, str]] = {
    "file": ("tpu_offload.storage.file_inspection", "FileInspector", ""),
    "object": ("tpu_offload.storage.object_inspection", "ObjectInspector", "obstore"),
    "valkey": ("tpu_offload.storage.valkey_inspection", "ValkeyInspector", "glide_sync"),
}
"""By tier: module and class of its `StoreInspector`, and the optional package that it needs."""

_SCHEMES = {
    "object": ("gs", "s3", "file", "memory"),
    "valkey": ("valkey", "valkeys", "redis", "rediss"),
}
_SETTING = f"{ENV_PREFIX}STORAGE_TIER="


def find_tier(name: str) -> type[StorageTier]:
    """The class of a registered name, or of a `module:Class`.

    Raises:
      ConfigError: the name is unknown, the module does not import, or the class is not derived from `StorageTier`, or
        is shared but has no `find`.
    """
    what = f"{_SETTING}{name}"
    module_name, colon, class_name = STORAGE_TIERS.get(name, name).partition(":")
    if not colon:
        known = f"one of {', '.join(STORAGE_TIERS)}, or " if STORAGE_TIERS else ""
        several = "; several are separated by `;`" if "," in name else ""
        raise ConfigError(f"{what}: there is no storage tier of this name; expected {known}module:Class{several}")
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
    return found


def make_tier(name: str, spec: StorageSpec) -> StorageTier:
    """Makes the tier of a registered name, or of a `module:Class`.

    Raises:
      ConfigError: there is none of this name, see `find_tier`, or its constructor fails.
    """
    found, what = find_tier(name), f"{_SETTING}{name}"
    try:
        return found(spec)
    except OffloadError:
        raise
    except Exception as e:
        raise ConfigError(f"{what}: it cannot be made ({type(e).__name__}: {one_line(e)}) with {one_line(spec)}") from e


def tier_of(options: str) -> str:
    """The name of the registered tier whose options these are: a directory is a `file` tier's, URLs tell by scheme.

    Raises:
      ConfigError: no tier has URLs of this scheme.
    """
    scheme, separator, _ = options.partition("://")
    if not separator:
        return "file"
    for tier, schemes in _SCHEMES.items():
        if scheme in schemes:
            return tier
    known = ", ".join(f"{scheme}://" for schemes in _SCHEMES.values() for scheme in schemes)
    raise ConfigError(f"{one_line(scheme)}:// is no storage tier; expected a directory, or one of {known}")


def open_inspector(options: str) -> StoreInspector:
    """Opens what a registered tier has stored, to list, read or clear it without an engine.

    Args:
      options: as `TPU_OFFLOAD_STORAGE_OPTIONS` of the tier.
    Raises:
      ConfigError: the options are wrong, or there is nothing of that tier.
      ImportError: the tier's library is not installed.
      OSError: the store does not answer.
    """
    module, name, _ = INSPECTORS[tier_of(options)]
    found: type[StoreInspector] = getattr(importlib.import_module(module), name)
    return found(options)  # type: ignore[call-arg]
