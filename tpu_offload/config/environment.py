"""The settings as text: the only reader of the environment, and one-line errors for what it cannot use."""

import difflib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pydantic

from tpu_offload.errors import ConfigError

ENV_PREFIX = "TPU_OFFLOAD_"


def env_name(field: str) -> str:
    """The environment variable that sets a field of `OffloadConfig`."""
    return ENV_PREFIX + field.upper()


def read_variable(name: str) -> str:
    """A variable of another package, which reads it itself and does not say what it read; empty if unset."""
    return os.environ.get(name, "")


def read_settings(
    environ: Mapping[str, str] | None,
    overrides: Mapping[str, Any] | None,
    *,
    known: Sequence[str],
    same_size: Sequence[tuple[str, ...]],
) -> dict[str, Any]:
    """Reads `TPU_OFFLOAD_*` from `environ` and puts the overrides over them.

    Args:
      environ: names and values; None for the process environment.
      overrides: settings by field name, or None.
      known: the fields of `OffloadConfig`.
      same_size: fields that set one size in different units. An override of one replaces the others of `environ`.
    Returns:
      Settings by field name, not parsed yet. Variables that Kubernetes sets for a Service are left out, such as
      `TPU_OFFLOAD_VALKEY_PORT` in each pod beside a Service `tpu-offload-valkey`.
    Raises:
      ConfigError: an unknown variable or setting, with the nearest known name, or a value that is not a string.
    """
    environ = os.environ if environ is None else environ
    if not isinstance(environ, Mapping) or not isinstance({} if overrides is None else overrides, Mapping):
        kinds = f"{type(environ).__name__} and {type(overrides).__name__}"
        raise ConfigError(f"environ and overrides are a {kinds}; expected mappings")
    given = {name: value for name, value in environ.items() if str(name).startswith(ENV_PREFIX)}
    for name, value in given.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ConfigError(f"{name}={_short(value)}; expected a string, as in an environment")
    variables = [env_name(field) for field in known]
    given = {name: value for name, value in given.items() if name in variables or not _is_of_service(name, given)}
    for name in sorted(given):
        if name not in variables:
            raise ConfigError(_unknown(name, _nearest(name.upper(), variables)))
    overrides = dict(overrides or {})
    for name in sorted(map(str, set(overrides) - set(known))):
        raise ConfigError(_unknown(name, _nearest(name.lower(), known)))
    settings: dict[str, Any] = {name.removeprefix(ENV_PREFIX).lower(): value.strip() for name, value in given.items()}
    for names in same_size:
        if any(overrides.get(name) is not None for name in names):
            settings = {name: value for name, value in settings.items() if name not in names}
    return settings | overrides


def one_line_error(error: pydantic.ValidationError, *, known: Collection[str], name: Callable[[str], str]) -> str:
    """Pydantic's first error as one line that names the setting, its value and what is allowed.

    Args:
      error: of `OffloadConfig`.
      known: the fields of `OffloadConfig`.
      name: gives the name under which the user set a field.
    """
    detail = error.errors(include_url=False)[0]
    if not detail["loc"]:  # raised by our own validator, already one line
        return str(detail["ctx"]["error"])
    field = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return _unknown(name(field), name(_nearest(field, known)))
    expected = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if "boolean" in expected:
        expected = "expected 0 or 1"
    return f"{name(field)}={_short(detail['input'])}: {expected[0].lower() + expected[1:]}"


def _is_of_service(name: str, given: Collection[str]) -> bool:
    """Whether it is a variable of a Kubernetes Service ("service links"), which has two variables of these names."""
    services = [other.removesuffix("_SERVICE_HOST") for other in given if other.endswith("_SERVICE_HOST")]
    return any(
        f"{service}_SERVICE_PORT" in given
        and (name.startswith((f"{service}_SERVICE_", f"{service}_PORT_")) or name == f"{service}_PORT")
        for service in services
    )


def _nearest(name: str, known: Collection[str]) -> str:
    """The known name that is most like this one: has most words in common, and of those is most alike in letters."""

    def likeness(other: str) -> tuple[float, float]:
        words = difflib.SequenceMatcher(None, name.split("_"), other.split("_"))
        return words.ratio(), difflib.SequenceMatcher(None, other, name).ratio()

    return max(known, key=likeness)


def _unknown(name: str, known_name: str) -> str:
    return f"{' '.join(name.split())} is not a setting of tpu_offload; did you mean {known_name}?"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"
