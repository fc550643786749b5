"""Programs that the compiler rejects or that exceed their HBM bound, and the HBM that is reported."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout

from tests.caches import random_caches
from tests.jobs import copy_job
from tpu_offload import CompileError, KVLayout, OffloadConfig, OffloadError, OffloadWorker
from tpu_offload.kernels import DirectCopier, TransferSpec, programs
from tpu_offload.kernels.compiled import CompiledPrograms
from tpu_offload.types import JobKind, JobState, StepPlan

OUT_OF_HBM = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM\n\nmore lines\n"


@pytest.fixture
def refusing(monkeypatch):
    """A compiler that refuses everything; how often it was asked."""
    asked = []

    def refuse(program):
        asked.append(program.name)
        raise jax.errors.JaxRuntimeError(OUT_OF_HBM)

    monkeypatch.setattr(programs.Program, "compile", refuse)
    return asked


def make_worker(**settings):
    caches = random_caches(np.random.default_rng(0))
    config = OffloadConfig.create(num_cpu_chunks=8, num_staging_blocks=8, **settings)
    layout = KVLayout.from_caches(caches, block_size=4)
    return OffloadWorker(config, layout, caches, available=2**30), caches


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_what_the_compiler_refuses_is_one_line_from_the_constructor(refusing, path):
    with pytest.raises(OffloadError) as caught:
        make_worker(save_path=path, load_path=path)
    message = str(caught.value)
    assert isinstance(caught.value, CompileError)
    assert "\n" not in message
    assert "CompileTimeHbmOom: Ran out of memory on HBM" in message
    assert "bfloat16[12, 4, 8, 2, 6]" in message
    assert refusing


def test_what_is_compiled_at_its_first_use_fails_its_jobs_and_is_tried_once(refusing):
    worker, caches = make_worker(skip_jax_precompile=True)
    worker.wait_until_allocated()
    for job_id in (1, 2):
        plan = StepPlan(
            step_id=job_id,
            jobs=(copy_job(job_id, JobKind.SAVE, (3,), (0,)),),
        )
        caches = worker.begin_step(plan, caches)
        worker.end_step(plan, caches)
        (result,) = worker.poll().results
        assert result.state is JobState.FAILED
        assert "the compiler refuses direct_save" in result.error
        assert "\n" not in result.error
    assert refusing == ["direct_save"]
    worker.close()


class Compiled:
    """What the compiler says of a program."""

    def __init__(self, temp_size_in_bytes):
        self.temp_size_in_bytes = temp_size_in_bytes

    def memory_analysis(self):
        return self


def programs_of(monkeypatch, platform, nbytes):
    spec = TransferSpec.from_caches(random_caches(np.random.default_rng(0)), segment_blocks=8, capacity=4)
    program = programs.direct_save(spec)
    monkeypatch.setattr(TransferSpec, "platform", platform)
    monkeypatch.setattr(programs.Program, "compile", lambda self: Compiled(nbytes))
    return CompiledPrograms(spec, num_blocks=2), spec, lambda _: program


def test_what_takes_more_than_it_may_is_refused_with_the_figures(monkeypatch):
    compiled, spec, build = programs_of(monkeypatch, "tpu", 2**23)
    with pytest.raises(CompileError, match="direct_save takes 8388608 bytes of HBM per device") as caught:
        compiled.get("save", build)
    assert "\n" not in str(caught.value)
    for said in ("[12, 4, 8, 2, 6]", "at most 4194304", f"blocks of {spec.block_nbytes_per_device}"):
        assert said in str(caught.value)


def sharing_tiles(spec):
    spec = dataclasses.replace(spec, cache_layout=Layout((1, 2, 3, 4, 0), ((8, 128),)))
    assert spec.blocks_together > 1
    return spec


def test_a_program_that_writes_in_turn_and_is_refused_leaves_the_plain_one(monkeypatch):
    _, spec, build = programs_of(monkeypatch, "tpu", 0)
    spec = sharing_tiles(spec)

    def build_one(spec):
        def compile_it(self):
            if spec.in_turn:
                raise RuntimeError("it crashed")
            return Compiled(2**23)

        monkeypatch.setattr(programs.Program, "compile", compile_it)
        return dataclasses.replace(build(spec), name="scatter")

    with pytest.raises(CompileError, match=r"scatter takes 8388608 .*LOAD_PATH=direct or blocks of 128"):
        CompiledPrograms(spec, num_blocks=1).get("load", build_one)


def test_where_blocks_share_tiles_the_program_that_writes_in_turn_is_tried(monkeypatch):
    _, spec, build = programs_of(monkeypatch, "tpu", 0)
    spec = sharing_tiles(spec)
    program = dataclasses.replace(build(spec), name="direct_load")
    asked = []

    def build_and_note(spec):
        asked.append(spec.in_turn)
        monkeypatch.setattr(programs.Program, "compile", lambda self: Compiled(2**20 if spec.in_turn else 2**23))
        return program

    compiled = CompiledPrograms(spec, num_blocks=2)
    assert compiled.get("load", build_and_note).temp_size_in_bytes == 2**20
    assert compiled.hbm_nbytes == 2**20
    assert asked == [False, True]


def test_hbm_is_what_was_compiled_where_the_backend_tells(monkeypatch):
    compiled, _, build = programs_of(monkeypatch, "tpu", 4711)
    assert compiled.hbm_nbytes == 4 * 2**20  # what it may be
    compiled.get("save", build)
    assert compiled.hbm_nbytes == 4711


def test_a_gpu_is_warned_of_and_a_cpu_not_asked(monkeypatch, caplog):
    compiled, _, build = programs_of(monkeypatch, "gpu", 2**20)
    compiled.get("save", build)
    assert compiled.hbm_nbytes == 2**20
    assert "takes 1048576 bytes" in caplog.text
    caplog.clear()
    compiled, spec, build = programs_of(monkeypatch, "cpu", 2**20)
    compiled.get("save", build)
    assert compiled.hbm_nbytes == 2 * spec.block_nbytes_per_device
    assert not caplog.text


def test_the_bound_of_a_copier_is_told_before_anything_is_compiled():
    spec = TransferSpec.from_caches(random_caches(np.random.default_rng(0)), segment_blocks=8, capacity=4)
    assert DirectCopier(spec, {}).hbm_nbytes == 2 * spec.block_nbytes_per_device  # type: ignore[arg-type]
