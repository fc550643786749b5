"""What XLA has compiled is kept from one process to the next, in a folder that sessions and their processes share.

jax names a program by what it compiles, for what and with which options, so a program that has changed is another
file. But jax writes in place: a process that is stopped leaves half a file, and another may read one that is being
written. So each process has a folder of its own, for jax, and copies whole files from and to the shared one.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_MAX_FILES = 5000  # about 50 MB
_WRITTEN_S = 1.0  # a file that has not changed for so long is whole


class KeptPrograms:
    """The folder of a process; `exchange` brings and takes.

    Args:
      own: for jax; of this process only.
      shared: may be used by any number of processes at once.
    """

    def __init__(self, own: Path, shared: Path) -> None:
        # XLA compiles for the processor at hand, of which jax's names say nothing.
        self._own, self.shared = own, shared / _processor()
        self.shared.mkdir(parents=True, exist_ok=True)

    def exchange(self) -> None:
        """Files that only one of the folders has are in the other then."""
        own, shared = self._files(self._own), self._files(self.shared)
        for name in shared - own:
            _copy(self.shared / name, self._own / name)
        for name in own - shared:
            if time.time() - (self._own / name).stat().st_mtime > _WRITTEN_S:
                _copy(self._own / name, self.shared / name)

    def prune(self) -> None:
        """Removes the oldest if there are too many."""
        files = [self.shared / name for name in self._files(self.shared)]
        if len(files) > _MAX_FILES:
            for path in sorted(files, key=_age)[: len(files) - _MAX_FILES // 2]:
                path.unlink(missing_ok=True)

    @staticmethod
    def _files(folder: Path) -> set[str]:
        return {name for name in os.listdir(folder) if not name.startswith(".")}


def _copy(source: Path, target: Path) -> None:
    """Puts the whole file in place at once."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        shutil.copyfile(source, partial)
        partial.replace(target)


def _age(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _processor() -> str:
    flags = ""
    with contextlib.suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        flags = found.group() if found else ""
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def compiled_once_each() -> Iterator[None]:
    """What workers of this process compile meanwhile is compiled once for each layout, but for programs of slots."""
    from tpu_offload.kernels.programs import Program

    real, compiled = Program.compile, dict[tuple[str, str], Any]()

    def compile_once(program: Program) -> Any:
        if "slot" in program.name:  # those differ also in what is not an argument: how many blocks a slot has
            return real(program)
        key = program.name, repr(program.args)
        if key not in compiled:
            compiled[key] = real(program)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "compile", compile_once)
        yield
