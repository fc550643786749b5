"""Finds storage tiers, by a registered name or `module:Class`: to make one, or to look at what one has stored."""

import importlib

from tpu_offload.config import ENV_PREFIX
from tpu_offload.config.registered_tiers import STORAGE_TIERS, tier_of_scheme
from tpu_offload.errors import ConfigError, OffloadError
from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.storage.inspection import StoreInspector
from tpu_offload.values import error_text, one_line

_SETTING = f"{ENV_PREFIX}STORAGE_TIER="


def find_tier(name: str) -> type[StorageTier]:
    """The class of a registered name, or of a `module:Class`.

    Raises:
      ConfigError: the name is unknown, the module does not import, or the class is not derived from `StorageTier`, or
        is shared but has no `find`.
    """
    what = f"{_SETTING}{name}"
    module_name, colon, class_name = (STORAGE_TIERS[name].path if name in STORAGE_TIERS else name).partition(":")
    if not colon:
        known = f"one of {', '.join(STORAGE_TIERS)}, or " if STORAGE_TIERS else ""
        several = "; several are separated by `;`" if "," in name else ""
        raise ConfigError(f"{what}: there is no storage tier of this name; expected {known}module:Class{several}")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as e:  # the user's own module may raise anything
        raise ConfigError(
            f"{what}: {module_name} cannot be imported ({error_text(e)}); expected a module on the "
            "PYTHONPATH, of an engine that of its workers' processes"
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
    except (Exception, SystemExit) as e:  # a library of the user's own tier may exit
        raise ConfigError(f"{what}: it cannot be made ({error_text(e)}) with {one_line(spec)}") from e


def tier_of(options: str) -> str:
    """The name of the registered tier whose options these are: a directory is a `file` tier's, URLs tell by scheme.

    Raises:
      ConfigError: no tier has URLs of this scheme.
    """
    scheme, separator, _ = options.partition("://")
    if not separator:
        return "file"
    if name := tier_of_scheme(scheme):
        return name
    known = ", ".join(f"{scheme}://" for tier in STORAGE_TIERS.values() for scheme in tier.schemes)
    raise ConfigError(f"{one_line(scheme)}:// is no storage tier; expected a directory, or one of {known}")


def open_inspector(options: str, tier: str = "") -> StoreInspector:
    """Opens what a tier has stored, to list, read or clear it without an engine.

    Args:
      options: as `TPU_OFFLOAD_STORAGE_OPTIONS` of the tier.
      tier: its name, or `module:Class`; without, as the options look.
    Raises:
      ConfigError: there is no such tier, it cannot be inspected, the options are wrong, or there is nothing of it.
      OSError: the store does not answer.
    """
    return find_tier(tier or tier_of(options)).open_inspector(options)
