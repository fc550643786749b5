"""Which versions of the packages work together, and what is known to be wrong with those installed."""

import contextlib
import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from typing import final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tpu_offload import __version__
from tpu_offload.config import OffloadConfig
from tpu_offload.doctor.findings import Finding, Findings, Level, error, ok, warning
from tpu_offload.native import is_compiled

_OTHER_NAMES = {"vllm-tpu": ("vllm",)}  # built from source for TPUs
_CHECK, _FAULTS, _COMPILED = "versions", "known faults", "compiled modules"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """Versions of a package that are known to work.

    Attributes:
      package: its name on the package index.
      versions: those that are supported, as setup.cfg has them.
      why: what goes wrong with others.
      of_vllm: whether only serving with vLLM needs it; a version outside is then untested, not broken.
    """

    package: str
    versions: str
    why: str
    of_vllm: bool = False


SUPPORTED = (
    Supported(package="python", versions=">=3.12", why="the package needs its syntax"),
    Supported(
        package="jax", versions=">=0.11.2", why="older ones move bf16 a thousand times slower and copy donated arrays"
    ),
    Supported(package="jaxlib", versions=">=0.11.2", why="as jax"),
    Supported(package="ml_dtypes", versions=">=0.5", why="8-bit types"),
    Supported(package="numpy", versions=">=2.0", why="the package needs its interface"),
    Supported(package="prometheus_client", versions=">=0.20", why="metrics"),
    Supported(package="psutil", versions=">=5.9", why="sizes of memory"),
    Supported(package="pydantic", versions=">=2.7", why="settings"),
    Supported(package="xxhash", versions=">=3.5", why="checksums of storage"),
    Supported(
        package="vllm-tpu",
        versions=">=0.32,<0.33",
        why="the connector uses private fields of it, tested with 0.32 only",
        of_vllm=True,
    ),
    Supported(package="tpu-inference", versions=">=0.32,<0.33", why="as vllm-tpu", of_vllm=True),
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault of another package that touches offloading.

    Attributes:
      package: the package.
      versions: those that have it.
      what: the fault.
      document: where it is described.
      needs_patch: whether the connector mends it only with `patch_runner`, which is on by default.
    """

    package: str
    versions: str
    what: str
    document: str
    needs_patch: bool = True


_RUNNER = ">=0.32,<0.33"
KNOWN_FAULTS = (
    KnownFault(
        package="tpu-inference",
        versions=_RUNNER,
        what="requests that a step leaves out lose their sampled token (async scheduling)",
        document="docs/upstream/tpu-inference-lost-tokens.md",
    ),
    KnownFault(
        package="tpu-inference",
        versions=_RUNNER,
        what="requests resumed in the step of a reset are computed on token 0 (async scheduling)",
        document="docs/upstream/tpu-inference-resumed-requests.md",
    ),
    KnownFault(
        package="tpu-inference",
        versions=_RUNNER,
        what="preempted requests send wrong prompt logprobs, which ends a server",
        document="docs/upstream/tpu-inference-prompt-logprobs.md",
    ),
    KnownFault(
        package="tpu-inference",
        versions=_RUNNER,
        what="structured outputs get the grammar masks of other requests",
        document="docs/upstream/tpu-inference-grammar-rows.md",
    ),
    KnownFault(
        package="tpu-inference",
        versions=_RUNNER,
        what="pipeline stages drop what connectors report",
        document="docs/upstream/tpu-inference-stage-outputs.md",
        needs_patch=False,
    ),
    KnownFault(
        package="tpu-inference",
        versions=_RUNNER,
        what="PyTorch models do not start in pipeline stages with a connector",
        document="docs/upstream/tpu-inference-stage-groups.md",
        needs_patch=False,
    ),
)


def installed_versions() -> dict[str, str]:
    """Versions of the packages in `SUPPORTED`, of libtpu and of this one, as far as they are installed."""
    versions = {"python": platform.python_version(), "tpu_offload": __version__}
    for package in ("libtpu", *(one.package for one in SUPPORTED)):
        for name in (package, *_OTHER_NAMES.get(package, ())):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.setdefault(package, importlib.metadata.version(name))
    return versions


def check_versions(installed: Mapping[str, str]) -> Findings:
    """Compares the installed versions with the table."""
    good: list[str] = []
    missing: list[str] = []
    for one in SUPPORTED:
        found = installed.get(one.package)
        if found is None:
            if one.of_vllm:
                missing.append(one.package)
            else:
                yield error(_CHECK, f"{one.package} is not installed", f"pip install '{one.package}{one.versions}'")
        elif not _matches(found, one.versions):
            said = f"{one.package} {found} is not supported ({one.why})"
            install = f"pip install '{one.package}{one.versions}'"
            action = "use Python 3.12 or newer" if one.package == "python" else install
            yield warning(_CHECK, said, action) if one.of_vllm else error(_CHECK, said, action)
        else:
            good.append(f"{one.package} {found}")
    if missing:
        yield warning(
            _CHECK,
            f"{' and '.join(missing)} not installed: vLLM cannot be served from this environment, other engines can",
            "run it in the environment in which `vllm serve` runs",
        )
    if installed.get("jax") and installed.get("jaxlib") and installed["jax"] != installed["jaxlib"]:
        yield warning(
            _CHECK,
            f"jax {installed['jax']} beside jaxlib {installed['jaxlib']}",
            "install the same version of both",
        )
    yield ok(_CHECK, ", ".join(good))


def check_compiled() -> Finding:
    """Says whether the package was compiled when it was installed. It works without."""
    if is_compiled():
        return ok(_COMPILED, "yes")
    return ok(_COMPILED, "no: the scheduler takes about twice the time (docs/deploy.md, Compiled modules)")


def check_known_faults(installed: Mapping[str, str], config: OffloadConfig | None) -> Findings:
    """Says which known faults the installed versions have, and whether the connector mends them."""
    mended = 0
    for fault in KNOWN_FAULTS:
        if not _matches(installed.get(fault.package, ""), fault.versions):
            continue
        if fault.needs_patch and config is not None and not config.patch_runner:
            yield _not_mended(fault, installed[fault.package])
        else:
            mended += 1
    if mended:
        unless = "" if config is not None else ", unless TPU_OFFLOAD_PATCH_RUNNER is 0"
        yield ok(_FAULTS, f"{mended} of the installed versions, mended by the connector{unless} (docs/upstream)")
    elif not any(fault.package in installed for fault in KNOWN_FAULTS):
        yield ok(_FAULTS, "none of what is installed")


def _not_mended(fault: KnownFault, version: str) -> Finding:
    return error(
        _FAULTS,
        f"{fault.package} {version}: {fault.what}, and TPU_OFFLOAD_PATCH_RUNNER=0 leaves that alone",
        f"unset TPU_OFFLOAD_PATCH_RUNNER ({fault.document})",
    )


def _matches(version: str, versions: str) -> bool:
    """Whether a version is in a range; a development version counts as the release that it leads to."""
    try:
        return Version(Version(version).base_version) in SpecifierSet(versions)
    except InvalidVersion:
        return False


def main() -> int:
    """For the build of an image that will serve, where a warning is an error, too: prints them; the exit status."""
    findings = [one for one in check_versions(installed_versions()) if one.level is not Level.OK]
    for one in findings:
        sys.stderr.write(f"{one.text} -> {one.action}\n")
    return 1 if findings else 0
