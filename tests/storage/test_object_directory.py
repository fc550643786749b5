"""The directory of the object tier, past obstore: what is removed, and who can read it."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import stat
import threading

import obstore
import pytest

from tests.storage.conformance import SPEC, key_of, payload, read, write
from tests.storage.objects import root_of, wait_until_swept
from tpu_offload import ConfigError
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
    with pytest.raises(PermissionError, match="1"):
        remove_tree(tree, threading.Event())
    assert sorted(tree.rglob("*")) == [tree / "a", tree / "a" / "1"]


def test_what_cannot_be_listed_is_an_error(tree, monkeypatch):
    """A process that is short of file descriptors took each directory for an empty one, and left all of it."""

    def fail(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises(OSError, match="Too many open files"):
            remove_tree(tree, threading.Event())
    remove_tree(tree, threading.Event())
    assert not tree.exists()


def test_a_generation_that_could_not_be_deleted_is_deleted_by_the_next_clear(tmp_path, monkeypatch, caplog):
    with contextlib.closing(opened(tmp_path)) as tier:
        write(tier, key_of(1), 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            tier.clear()
            wait_until_swept()
        assert "objects of earlier generations cannot be deleted (OSError: " in caplog.text
        assert sum(path.is_file() for path in tmp_path.rglob("*")) == 2
        tier.clear()
        wait_until_swept()
        assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1, "that names the generation"


def refuse(path):
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_a_full_disk_does_not_keep_an_engine_from_what_is_there(tmp_path, monkeypatch, caplog):
    """The start writes only to see whether it may."""
    full = obstore.exceptions.GenericError("Generic LocalFileSystem error: No space left on device (os error 28)")

    def fail(*args, **kwargs):
        raise full

    with contextlib.closing(opened(tmp_path)) as tier:
        write(tier, key_of(1), 1)
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", fail)
        with pytest.raises(ConfigError, match="No space left"):
            opened(tmp_path / "other")
        tier = opened(tmp_path)
        assert "is full (" in caplog.text
        assert tier.stored_keys() == [key_of(1)]
        assert read(tier, key_of(1)) == payload(1)
        with pytest.raises(OSError, match="No space left"):
            write(tier, key_of(2), 2)
    write(tier, key_of(2), 2)
    tier.close()
    with contextlib.closing(opened(tmp_path)) as tier:
        assert sorted(tier.stored_keys()) == [key_of(1), key_of(2)]
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put", fail)
            with pytest.raises(OSError, match="No space left"):
                tier.clear()
            wait_until_swept()
            assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1, "the old records make room for the new"
        tier.clear()
        write(tier, key_of(3), 3)
        assert read(tier, key_of(3)) == payload(3)


def test_files_of_a_killed_writer_that_cannot_be_removed_do_not_cost_what_is_stored(tmp_path, monkeypatch, caplog):
    with contextlib.closing(opened(tmp_path)) as tier:
        write(tier, key_of(1), 1)
    halves = [tmp_path / root_of(tier) / f"generation#{i}" for i in range(3)]
    for half in halves:
        half.write_bytes(b"half")
    unlink = pathlib.Path.unlink

    def fail(path, **options):
        if path == halves[1]:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, **options)

    with contextlib.closing(opened(tmp_path)) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "unlink", fail)
            assert tier.stored_keys() == [key_of(1)]
        assert [half.exists() for half in halves] == [False, True, False]
        assert "files of a killed writer cannot be deleted (PermissionError: " in caplog.text
        assert read(tier, key_of(1)) == payload(1)


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


@pytest.mark.parametrize("begins_with", ["a write", "a read", "a clear"])
def test_a_directory_that_is_deleted_is_made_again_for_its_user_only(tmp_path, usual_umask, begins_with):
    """obstore made it with the umask's mode, and its files are for whoever may reach them."""
    directory = tmp_path / "new"
    with contextlib.closing(opened(directory)) as tier:
        write(tier, key_of(1), 1)
        shutil.rmtree(directory)
        if begins_with == "a read":
            with pytest.raises(KeyError):
                read(tier, key_of(1))
        elif begins_with == "a clear":
            tier.clear()
            assert mode_of(directory) == 0o700
        write(tier, key_of(2), 2)
        assert mode_of(directory) == 0o700
    with contextlib.closing(opened(directory)) as tier:
        assert tier.stored_keys() == [key_of(2)], "the generation is named again, too"


def test_a_directory_that_cannot_be_made_again_is_a_failed_write(tmp_path):
    directory = tmp_path / "parent" / "new"
    with contextlib.closing(opened(directory)) as tier:
        shutil.rmtree(directory.parent)
        directory.parent.write_text("a file")
        with pytest.raises(OSError, match="parent"):
            write(tier, key_of(1), 1)


def test_a_directory_that_was_there_keeps_its_mode(tmp_path, usual_umask):
    tmp_path.chmod(0o775)
    opened(tmp_path).close()
    assert mode_of(tmp_path) == 0o775
