"""Engines have one identity only if they compute the same KV from the same tokens."""

import copy
import os
from types import SimpleNamespace

import pytest
from vllm.config import MultiModalConfig

from tests.adapters.engine_config import make_config
from tpu_offload.adapters.vllm import cache_layout
from tpu_offload.adapters.vllm.model_identity import model_identity

pytestmark = pytest.mark.vllm


def vllm_config():
    """One that a test may change: vLLM's own are shared, or frozen."""
    config = make_config(num_blocks=8)
    model = copy.copy(config.model_config)
    model.hf_config = copy.deepcopy(model.hf_config)
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        additional_config={"sharding": {}},
        speculative_config=None,
    )


def changed(change, config=None):
    config = config or vllm_config()
    change(config)
    return model_identity(config)


def test_it_is_reproducible_and_names_the_model():
    assert model_identity(vllm_config()) == model_identity(vllm_config())
    assert model_identity(vllm_config()).startswith(vllm_config().model_config.model)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "revision", "abc"),
        lambda c: setattr(c.model_config, "dtype", "float64"),
        lambda c: setattr(c.model_config, "quantization", "fp8"),
        lambda c: setattr(c.model_config.hf_config, "rope_theta", 12345.0),
        lambda c: setattr(c.model_config.hf_config, "_commit_hash", "0123"),
        lambda c: setattr(c.load_config, "load_format", "other"),
        lambda c: setattr(c.model_config, "model_impl", "transformers"),
        lambda c: setattr(c.model_config, "code_revision", "abc"),
        lambda c: c.additional_config.update(quantization={"qwix": {"rules": [{"weight_qtype": "int8"}]}}),
    ],
)
def test_what_the_kv_depends_on_changes_it(change):
    assert changed(change) != model_identity(vllm_config())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL_IMPL_TYPE", "vllm"),
        ("REQUANTIZE_WEIGHT_DTYPE", "int8"),
        ("BF16_LINEAR_REQUANTIZE_PATTERNS", "re:.*qkv_proj"),
        ("MOE_REQUANTIZE_CLIP_PERCENTILE", "99"),
        ("DISABLE_WEIGHT_REQUANTIZATION", "1"),
        ("MOE_APPROX_TOPK", "1"),
        ("USE_BATCHED_RPA_SEQ_ON_LANE", "1"),
        ("MLA_TRANSPOSE_KV_CACHE", "1"),
        ("TPU_MOE_FP8_OUTPUT_COMM", "fp8"),
    ],
)
def test_how_tpu_inference_computes_changes_it(monkeypatch, name, value):
    """Other weights than those on disk, approximations, or pages that may have the same shape and another order."""
    before = model_identity(vllm_config())
    monkeypatch.setenv(name, value)
    assert model_identity(vllm_config()) != before


def test_what_differs_between_hosts_does_not_change_it(monkeypatch):
    before = model_identity(vllm_config())
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    monkeypatch.setenv("PHASED_PROFILING_DIR", "somewhere")
    monkeypatch.setenv("NUM_PRECOMPILE_WORKERS", "4")
    assert model_identity(vllm_config()) == before


def test_a_stage_is_named_by_its_layers(monkeypatch):
    """With several devices in each stage, tpu-inference makes as many arrays for either division."""

    def names(partition):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        model = SimpleNamespace(get_total_num_hidden_layers=lambda: 7)
        parallel = SimpleNamespace(pipeline_parallel_size=partition.count(",") + 1)
        config = SimpleNamespace(model_config=model, parallel_config=parallel)
        return [
            cache_layout.stage_layers(SimpleNamespace(vllm_config=config, rank=rank))
            for rank in range(parallel.pipeline_parallel_size)
        ]

    assert names("2,2,2,1") == ["0 to 1 of 7", "2 to 3 of 7", "4 to 5 of 7", "6 to 6 of 7"]
    assert names("2,2,1,2") == ["0 to 1 of 7", "2 to 3 of 7", "4 to 4 of 7", "5 to 6 of 7"]
    assert names("7") == [""]


def test_dummy_weights_are_those_of_their_seed():
    def identity(load_format, seed):
        config = vllm_config()
        config.load_config.load_format, config.model_config.seed = load_format, seed
        return model_identity(config)

    assert identity("dummy", 1) != identity("dummy", 2)
    assert identity("auto", 1) == identity("auto", 2)


@pytest.mark.parametrize(
    "change", [{"mm_processor_kwargs": {"do_rescale": False}}, {"media_io_kwargs": {"video": {"fps": 1}}}]
)
def test_how_the_engine_prepares_images_changes_it(change):
    """vLLM's hash of an image has only what the request sets, so the hashes of its blocks are the same."""
    config = vllm_config()
    config.model_config.multimodal_config = MultiModalConfig()
    before = model_identity(config)
    config.model_config.multimodal_config = MultiModalConfig(**change)
    assert model_identity(config) != before


def test_a_draft_model_with_layers_of_its_own_changes_it():
    """They are in the blocks, too."""

    def identity(name, revision=None):
        config = vllm_config()
        draft = copy.copy(config.model_config)
        draft.model, draft.revision = name or draft.model, revision
        config.speculative_config = SimpleNamespace(draft_model_config=draft)
        return model_identity(config)

    without = model_identity(vllm_config())
    assert len({without, identity("draft"), identity("draft", "abc"), identity("other")}) == 4
    assert identity(None) == without, "n-gram drafts"
    config = vllm_config()
    config.speculative_config = SimpleNamespace(draft_model_config=None)
    assert model_identity(config) == without


def test_the_longest_context_matters_to_models_whose_positions_depend_on_it():
    """vLLM's long rope: keys of all positions are others if the context may exceed the model's original one."""

    def identity(rope_type, max_model_len):
        config = vllm_config()
        config.model_config.max_model_len = max_model_len
        config.model_config.hf_config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0}
        return model_identity(config)

    assert identity("longrope", 4096) != identity("longrope", 8192)
    assert identity("default", 4096) == identity("default", 8192)


def test_weights_that_changed_in_place_change_it(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(os.urandom(300_000))
    (tmp_path / "config.json").write_text("{}")

    def identity():
        return changed(lambda c: setattr(c.model_config, "model", str(tmp_path)))

    before = identity()
    os.utime(tmp_path / "a.safetensors", (1, 1))
    assert identity() == before
    (tmp_path / "a.safetensors").write_bytes(os.urandom(300_000))
    assert identity() != before
    (tmp_path / "b.safetensors").write_bytes(b"x")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    assert identity() not in (before, changed(lambda c: None))
