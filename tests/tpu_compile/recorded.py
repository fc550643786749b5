"""Figures of programs that were compiled before, in `figures.json`: compiling them takes two CPU minutes.

The key of a program is a hash of everything that its figures depend on: the lowered program, the case with its
topology, the versions of jax and of the TPU compiler, the compiler's settings, and the source that computes the
figures. So a program that has changed in any way, or another compiler, is compiled; only time is lost then.
`scripts/test tests/tpu_compile --record-figures` writes the file anew.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.tpu_compile.figures import figures
from tests.tpu_compile.harness import ENVIRONMENT, Case

PATH = Path(__file__).with_name("figures.json")
_SOURCES = ("figures.py", "schedule.py")
_COMPILERS = ("jax", "jaxlib", "libtpu")
_SETTINGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "JAX_ENABLE_X64")


def load() -> dict[str, dict[str, Any]]:
    """Recorded figures by key."""
    known: dict[str, dict[str, Any]] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return known


def save(found: Mapping[str, dict[str, Any]]) -> None:
    """Replaces the record; one line a program."""
    lines = [f"{json.dumps(key)}: {json.dumps(found[key], sort_keys=True)}" for key in sorted(found)]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def key(lowered: str, case: Case) -> str:
    """Of a lowered program, as text, and the case that it was made for."""
    sources = [(Path(__file__).parent / name).read_text() for name in _SOURCES]
    versions = [importlib.metadata.version(name) for name in _COMPILERS]
    settings = [ENVIRONMENT, *(os.environ.get(name, "") for name in _SETTINGS)]
    parts = [lowered, dataclasses.asdict(case), versions, settings, sources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Recorded:
    """A `programs.Program` that is compiled only if its figures are not known; then also what `compile` returns.

    Args:
      program: the program.
      case: what it is compiled for.
      known: figures by key.
      tried: gets the figures by key.

    Attributes:
      figures: what `figures.figures` returns of it; from `compile` on.
    """

    def __init__(
        self, program: Any, case: Case, known: Mapping[str, dict[str, Any]], tried: dict[str, dict[str, Any]]
    ) -> None:
        self._program, self._case, self._known, self._tried = program, case, known, tried
        self.name: str = program.name
        self.figures: dict[str, Any] = {}

    def compile(self) -> "Recorded":
        """As `Program.compile`."""
        lowered = self._program.lower()
        name = key(lowered.as_text(), self._case)
        self.figures = self._known.get(name) or figures(lowered.compile(), self._case)
        self._tried[name] = self.figures
        return self

    def memory_analysis(self) -> Any:
        """As `jax.stages.Compiled.memory_analysis`: what the library asks."""
        return SimpleNamespace(temp_size_in_bytes=self.figures["temp_nbytes"])
