"""Compiled programs go from process to process whole, or not at all."""

import os

import pytest

from tests import kept_programs
from tests.kept_programs import KeptPrograms


@pytest.fixture
def folders(tmp_path):
    """Two processes' own folders, and what exchanges each with the shared one."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    return [(folder, KeptPrograms(folder, tmp_path / "shared")) for folder in folders]


def write(path, text, *, age_s=10.0):
    path.write_text(text)
    now_s = path.stat().st_mtime
    os.utime(path, (now_s, now_s - age_s))


def test_what_one_has_compiled_the_other_finds(folders):
    (a, of_a), (b, of_b) = folders
    write(a / "1", "one")
    write(b / "2", "two")
    for programs in (of_a, of_b, of_a):
        programs.exchange()
    for folder in (a, b):
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"1": "one", "2": "two"}


def test_what_may_still_be_written_is_not_given_away(folders):
    (a, of_a), (b, of_b) = folders
    write(a / "1", "half", age_s=0.0)
    os.utime(a / "1", (2**33, 2**33))  # however slow this is
    of_a.exchange()
    of_b.exchange()
    assert list(b.iterdir()) == []
    write(a / "1", "whole")
    of_a.exchange()
    of_b.exchange()
    assert (b / "1").read_text() == "whole"


def test_half_a_copy_is_not_taken(folders):
    (_, of_a), (b, of_b) = folders
    (of_a.shared / ".1.4711").write_text("half")
    of_b.exchange()
    assert list(b.iterdir()) == []


def test_the_oldest_are_removed(folders, monkeypatch):
    monkeypatch.setattr(kept_programs, "_MAX_FILES", 4)
    (a, of_a), _ = folders
    for i in range(5):
        write(a / str(i), "", age_s=100.0)
        of_a.exchange()
        os.utime(of_a.shared / str(i), (i, i))
    of_a.prune()
    assert sorted(path.name for path in of_a.shared.iterdir()) == ["3", "4"]
    assert len(list(a.iterdir())) == 5
