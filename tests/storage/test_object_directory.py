"""The directory of the object tier, past obstore: what is removed, and who can read it."""

import dataclasses
import os
import stat
import threading

import pytest

from tests.storage.conformance import SPEC, key_of, write
from tests.storage.objects import root_of, wait_until_swept
from tpu_offload.storage.object import ObjectTier
from tpu_offload.storage.object_directory import remove_tree


@pytest.fixture
def tree(tmp_path):
    """A directory with files, directories and links to what must stay."""
    root, outside = tmp_path / "tree", tmp_path / "outside"
    for directory in (root / "a" / "b", root / "empty", outside):
        directory.mkdir(parents=True)
    for i in range(3):
        for directory in (root, root / "a", root / "a" / "b", outside):
            (directory / f"{i}").write_bytes(b"x")
    (root / "to a directory").symlink_to(outside)
    (root / "a" / "to a file").symlink_to(outside / "0")
    (root / "to nothing").symlink_to(tmp_path / "nothing")
    return root


def test_a_tree_is_removed_and_not_what_links_point_to(tree):
    remove_tree(tree, threading.Event())
    assert not tree.exists()
    assert len(list(tree.with_name("outside").iterdir())) == 3
    remove_tree(tree, threading.Event())  # nothing


def test_a_link_to_a_tree_is_left_alone(tree):
    link = tree.with_name("link")
    link.symlink_to(tree)
    before = sorted(tree.rglob("*"))
    remove_tree(link, threading.Event())
    assert link.is_symlink()
    assert sorted(tree.rglob("*")) == before


def test_a_removal_stops_between_two_files_or_directories(tree, monkeypatch):
    num_paths = len(list(tree.rglob("*"))) + 1
    stop = threading.Event()

    def stopping(call):
        def wrapped(path):
            call(path)
            stop.set()

        return wrapped

    monkeypatch.setattr(os, "unlink", stopping(os.unlink))
    monkeypatch.setattr(os, "rmdir", stopping(os.rmdir))
    for num_left in reversed(range(num_paths)):
        stop.clear()
        remove_tree(tree, stop)
        assert len(list(tree.rglob("*"))) + tree.exists() == num_left


def test_what_cannot_be_removed_does_not_keep_the_rest(tree, monkeypatch):
    unlink = os.unlink

    def fail(path):
        if path == str(tree / "a" / "1"):
            raise PermissionError(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", fail)
    remove_tree(tree, threading.Event())
    assert sorted(tree.rglob("*")) == [tree / "a", tree / "a" / "1"]


def opened(directory):
    return ObjectTier(dataclasses.replace(SPEC, options=f"file://{directory}"))


def test_an_earlier_generation_without_files_is_removed_at_the_start(tmp_path):
    """As a deletion leaves it that was stopped after its last file."""
    tier = opened(tmp_path)
    write(tier, key_of(1), 1)
    tier.close()
    root = tmp_path / root_of(tier)
    current = {path.name for path in root.iterdir()}
    (root / "0123456789abcdef" / "ab").mkdir(parents=True)
    tier = opened(tmp_path)
    assert tier.stored_keys() == [key_of(1)]
    wait_until_swept()
    tier.close()
    assert {path.name for path in root.iterdir()} == current


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_new_directory_is_for_its_user_only(tmp_path, usual_umask):
    tier = opened(tmp_path / "parent" / "new")
    write(tier, key_of(1), 1)
    tier.close()
    assert mode_of(tmp_path / "parent") == 0o755
    assert mode_of(tmp_path / "parent" / "new") == 0o700


def test_a_directory_that_was_there_keeps_its_mode(tmp_path, usual_umask):
    tmp_path.chmod(0o775)
    opened(tmp_path).close()
    assert mode_of(tmp_path) == 0o775
