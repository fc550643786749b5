"""Atomic writes of a command's output files."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_offload.errors import InputError


def output_file(name: str | Path) -> Path:
    """The type of a flag that names an output file: fails early if the file cannot be written.

    Raises:
      InputError: it cannot be written.
    """
    path = Path(name)
    try:
        reason = _refusal(path)
    except OSError as e:  # a loop of symbolic links, a directory that may not be searched, a name that is too long
        reason = e.strerror or str(e)
    if reason:
        raise InputError(f"cannot write {path}: {reason}")
    return path


def _refusal(path: Path) -> str:
    """Why a file cannot be written; empty if it can.

    Raises:
      OSError: it cannot even be looked for.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode):
        return "it is a directory"
    if found is not None and not os.access(path, os.W_OK):
        return "permission denied"
    if found is not None and not stat.S_ISREG(found.st_mode):
        return ""  # written in place; files are replaced as a whole, which their directory has to allow
    directory = path.resolve().parent
    if not directory.is_dir():
        return f"there is no directory {directory}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"no file may be made in {directory}"
    of = directory.stat()
    if found is not None and of.st_mode & stat.S_ISVTX and os.geteuid() not in (0, found.st_uid, of.st_uid):
        return f"in {directory}, which is sticky, only its owner may replace it"
    return ""


def check_outputs(inputs: Mapping[str, Path], **outputs: Path | None) -> None:
    """Refuses an output file that is also an input or another output, under any name.

    Args:
      inputs: files that are read, by what a message calls them.
      outputs: files to write, by their flags without dashes; None is no file.
    Raises:
      InputError: two are the same file.
    """
    taken = {os.path.realpath(path): name for name, path in inputs.items()}
    for name, path in outputs.items():
        if path is None:
            continue
        owner = taken.get(os.path.realpath(path))
        if owner:
            raise InputError(f"--{name} {path} is the same file as {owner}; expected another file")
        taken[os.path.realpath(path)] = f"--{name} {path}"


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report atomically.

    Raises:
      InputError: the file cannot be written.
    """
    write_file(path, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically.

    Raises:
      InputError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal, which may have no other name (/dev/stdout)
            path.write_bytes(content)
            return
        path = path.resolve()
        # In the same directory, so that the rename stays within one file system.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror or e}") from e
