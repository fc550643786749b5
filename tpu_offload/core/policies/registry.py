"""Finds the eviction policy that a setting names: a built-in one, or a class in another module."""

import difflib
import importlib
from collections.abc import Callable

from tpu_offload.config import DEFAULT_EVICTION_POLICY, ENV_PREFIX, EvictionPolicyName
from tpu_offload.core.policies.arc import ARCPolicy
from tpu_offload.core.policies.base import EvictionPolicy
from tpu_offload.core.policies.density import DensityPolicy
from tpu_offload.core.policies.lru import LRUPolicy
from tpu_offload.core.policies.s3fifo import S3FIFOPolicy
from tpu_offload.core.policies.wtinylfu import WTinyLFUPolicy
from tpu_offload.errors import ConfigError
from tpu_offload.values import error_text, one_line

POLICIES: dict[str, type[EvictionPolicy]] = {
    EvictionPolicyName.DENSITY.value: DensityPolicy,
    EvictionPolicyName.LRU.value: LRUPolicy,
    EvictionPolicyName.ARC.value: ARCPolicy,
    EvictionPolicyName.S3FIFO.value: S3FIFOPolicy,
    EvictionPolicyName.WTINYLFU.value: WTinyLFUPolicy,
}
DEFAULT_POLICY = DEFAULT_EVICTION_POLICY.value
REQUIRED = "insert", "touch", "remove", "became_leaf", "clear", "evict", "check_invariants"  # methods of a policy


def find_policy(
    name: EvictionPolicyName | str, *, setting: str = f"{ENV_PREFIX}EVICTION_POLICY="
) -> type[EvictionPolicy]:
    """The policy of this name, or the class that `module:Class` names, which is imported.

    Args:
      name: what to find.
      setting: the setting that names it, for errors; the name follows it.
    Raises:
      ConfigError: there is no policy of this name, the module does not import, or its class does not derive from
        `EvictionPolicy` or is not constructed without arguments.
    """
    name = name.value if isinstance(name, EvictionPolicyName) else name
    if name in POLICIES:
        return POLICIES[name]
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise ConfigError(f"unknown eviction policy {name!r}; expected one of {', '.join(POLICIES)}, or module:Class")
    what = f"{setting}{name}"
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # a module that is not ours may raise anything
        raise ConfigError(
            f"{what}: {module_name} cannot be imported ({error_text(e)}); expected a module on the "
            "PYTHONPATH of the engine's process"
        ) from e
    found = getattr(module, class_name, None)
    if found is None:
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        raise ConfigError(f"{what}: {module_name} has no {class_name}" + (f"; did you mean {near[0]}?" if near else ""))
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(
            f"{what}: {class_name} is {one_line(found)}; expected a class derived from tpu_offload.EvictionPolicy"
        )
    check_maker(found, what=what)
    return found


def check_maker(make: Callable[[], object], *, what: str) -> None:
    """Raises ConfigError unless this makes eviction policies; makes two to find out."""
    given: object = make  # may be anything, whatever its annotation
    if isinstance(given, EvictionPolicy):
        name = type(given).__name__
        raise ConfigError(
            f"{what}: got an instance of {name}; expected a class or factory, because each priority in use has its own "
            f"policy: pass {name}, not {name}()"
        )
    try:
        made, other = make(), make()
        if isinstance(made, EvictionPolicy) and (missing := _abstract_methods(type(made))):
            raise TypeError(f"Can't instantiate abstract class {type(made).__name__} without {', '.join(missing)}")
    except Exception as e:
        raise ConfigError(
            f"{what}: it cannot be constructed without arguments ({error_text(e)}); expected a class "
            "whose constructor needs none and which implements all abstract methods"
        ) from e
    if not isinstance(made, EvictionPolicy):
        raise ConfigError(f"{what}: it returns a {type(made).__name__}; expected an EvictionPolicy")
    if made is other:
        raise ConfigError(
            f"{what}: it returns the same {type(made).__name__} each time; expected a new one for each priority"
        )


def _abstract_methods(cls: type[EvictionPolicy]) -> list[str]:
    """Those that a policy lacks. Python does not let it be made; compiled (`tpu_offload.native`), nothing else does."""
    return [name for name in REQUIRED if getattr(cls, name) is getattr(EvictionPolicy, name)]
