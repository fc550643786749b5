"""Recorded figures stand for a compilation only while nothing that they depend on has changed."""

import dataclasses
import importlib.metadata
import importlib.util

import pytest

from tests.tpu_compile import recorded
from tests.tpu_compile.harness import Case, Compiler

CASE = Case("v6e:2x2", 4, num_layers=2, num_blocks=64, programs=("direct_load",))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_they_are_what_the_compiler_says():
    """Compiled here, whatever is recorded; then taken as they are, but not for another program."""
    compiler = Compiler({})
    (compiled,) = compiler.compile([CASE])
    compiler.close()
    (name,) = compiler.figures
    assert recorded.load().get(name, compiler.figures[name]) == compiler.figures[name]

    other = Compiler({name: compiler.figures[name] | {"code_nbytes": -1}})
    known, larger = other.compile([CASE, dataclasses.replace(CASE, num_blocks=65)])
    other.close()
    apart = {"compile_s", "code_nbytes"}
    assert {k: v for k, v in known.items() if k not in apart} == {k: v for k, v in compiled.items() if k not in apart}
    assert known["code_nbytes"] == -1
    assert larger["code_nbytes"] > 0


def test_the_key_depends_on_the_program_the_case_and_the_compiler(monkeypatch):
    versions = dict.fromkeys(("jax", "jaxlib", "libtpu"), "1")
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    keys = {recorded.key("add", CASE), recorded.key("add", CASE)}
    assert len(keys) == 1
    keys |= {recorded.key("multiply", CASE), recorded.key("add", dataclasses.replace(CASE, topology="v5e:2x2"))}
    for name in versions:
        monkeypatch.setitem(versions, name, "2")
        keys.add(recorded.key("add", CASE))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--flag")
    keys.add(recorded.key("add", CASE))
    assert len(keys) == 7
