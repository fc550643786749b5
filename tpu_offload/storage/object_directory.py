"""The directory of an `object` tier, where obstore's `LocalStore` does not do what the tier needs."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

STAGING = re.compile(r"#\d+$")  # of `LocalStore`, for files that are being written


def make_directory(path: Path) -> bool:
    """Makes the directory of a tier, for its user only, unless it is there; returns whether it was missing.

    obstore would make it with the mode that the umask gives, and its files are for whoever may reach them.

    Raises:
      OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    return True


def directories_of(root: Path) -> set[str]:
    """The names of the directories in a directory, without symbolic links. obstore lists no directory without files."""
    _, names, _ = next(os.walk(root), ("", [], []))
    return {name for name in names if not (root / name).is_symlink()}


def remove_staging_files(root: Path) -> None:
    """Removes files whose writer was killed. obstore does not list them.

    Raises:
      OSError: the first of those that could not be removed.
    """
    errors: list[OSError] = []
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                if STAGING.search(name):
                    Path(directory, name).unlink(missing_ok=True)
            except OSError as e:
                errors.append(e)
    if errors:
        raise errors[0]


def remove_tree(root: Path, stop: threading.Event) -> None:
    """Removes a directory and all in it that can be removed, as `shutil.rmtree` does, which cannot be stopped.

    Args:
      root: the directory; a symbolic link is left alone.
      stop: once it is set nothing further is removed.
    Raises:
      OSError: the first of what could not be listed or removed.
    """
    errors: list[OSError] = []
    for remove, path in _removals(root, errors.append):
        if stop.is_set():
            return
        try:
            remove(path)
        except OSError as e:
            errors.append(e)
    errors = [e for e in errors if not isinstance(e, FileNotFoundError)]  # gone is gone
    if errors:
        raise errors[0]


def _removals(root: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[Callable[[str], None], str]]:
    """What removes a directory, from the leaves to the root, with the path for each."""
    if root.is_symlink():
        return
    for directory, directories, names in os.walk(root, topdown=False, onerror=onerror):
        for name in (*names, *directories):  # links, of the directories: others are gone, or stay with what they have
            yield os.unlink, os.path.join(directory, name)
        yield os.rmdir, directory
