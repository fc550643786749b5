"""Output files of commands."""

import json

import pytest

from tpu_offload.cli import output
from tpu_offload.errors import InputError


def test_file_is_replaced_whole(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    output.write_json(path, {"x": 1})
    assert json.loads(path.read_text()) == {"x": 1}
    with pytest.raises(ValueError, match="JSON"):
        output.write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_file_that_cannot_be_written(tmp_path):
    for path, reason in ((tmp_path, "it is a directory"), (tmp_path / "no" / "r.json", "there is no directory")):
        with pytest.raises(InputError, match=reason):
            output.output_file(path)
        with pytest.raises(InputError, match="cannot write"):
            output.write_json(path, {})
    assert output.output_file(str(tmp_path / "r.json")) == tmp_path / "r.json"
    assert not list(tmp_path.iterdir())
