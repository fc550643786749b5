"""Packages that commands need and an environment that serves does not: the extras of setup.cfg."""

import importlib.util

from tpu_offload.errors import InputError

_EXTRAS = {"flax": "engine", "matplotlib": "cli", "rich": "cli"}


def require(what: str, *packages: str) -> None:
    """Looks for packages of extras, without importing them.

    Args:
      what: the command or flag that needs them.
      packages: names to import them by.
    Raises:
      InputError: some are not installed; says how to install them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        extras = ",".join(sorted({_EXTRAS[package] for package in missing}))
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed; "
            f"install with: pip install 'tpu_offload[{extras}]'"
        )
