"""Reading a `config.json`: the built-in models against published figures, kinds of layers, and bad files."""

import configparser
import json
from pathlib import Path

import pytest

from tpu_offload.errors import InputError
from tpu_offload.plan import WEIGHTS, built_in_models, find_model, read_config
from tpu_offload.plan.model_config import _SHAPES

LLAMA = json.loads((_SHAPES / "llama-3.1-8b.json").read_text())
QWEN = json.loads((_SHAPES / "qwen3.5-397b.json").read_text())


def read(**changes):
    config = {name: value for name, value in (LLAMA | changes).items() if value is not None}
    return read_config(config, name="it")


@pytest.mark.parametrize("name", built_in_models())
def test_parameters_are_those_published(name):
    """The active ones of gpt-oss and DeepSeek are published without the embedding."""
    published = json.loads((_SHAPES / f"{name}.json").read_text())
    model = find_model(name)
    assert model.params.total == pytest.approx(published["_params"], rel=0.005)
    if active := published.get("_active_params"):
        assert model.params.active - model.params.embedding / 2 == pytest.approx(active, rel=0.06)
    assert model.repo == published["_repo"]


def test_kv_of_the_built_in_models_by_hand():
    """Layers of each kind, KV heads and widths, as their pages say."""
    shapes = {
        name: [(a.count, a.num_kv_heads, a.head_dim, a.window) for a in find_model(name).attention]
        for name in built_in_models()
    }
    assert shapes == {
        "deepseek-v3": [(61, 1, 0, 0)],
        "gemma-3-27b": [(10, 16, 128, 0), (52, 16, 128, 1024)],
        "gpt-oss-120b": [(18, 8, 64, 0), (18, 8, 64, 128)],
        "llama-3.1-70b": [(80, 8, 128, 0)],
        "llama-3.1-8b": [(32, 8, 128, 0)],
        "qwen3-32b": [(64, 8, 128, 0)],
        "qwen3.5-397b": [(15, 2, 256, 0)],
    }
    states = find_model("qwen3.5-397b").states
    assert states is not None
    assert states.nbytes == 45 * (3 * 12288 * 2 + 64 * 128 * 128 * 4)


@pytest.mark.parametrize(
    ("changes", "total", "active"),
    [
        # Mixtral 8x7B, Llama 4 Scout and Maverick, Phi-2 (no gate), Gemma 2 9B: published numbers.
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "model_type": "mixtral"},
            46.7e9, 12.9e9,
        ),
        (
            {
                "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
                "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "num_hidden_layers": 48,
                "num_attention_heads": 40, "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048,
            },
            109e9, 17e9,
        ),
        (
            {
                "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
                "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2, "num_hidden_layers": 48,
                "num_attention_heads": 40, "num_local_experts": 128, "num_experts_per_tok": 1, "vocab_size": 202048,
            },
            401e9, 17e9,
        ),
        (
            {
                "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32,
                "num_key_value_heads": 32, "vocab_size": 51200, "tie_word_embeddings": False,
            },
            2.78e9, 2.78e9,
        ),
        (
            {
                "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
                "num_attention_heads": 16, "head_dim": 256, "vocab_size": 256000, "tie_word_embeddings": None,
            },
            9.24e9, 9.24e9,
        ),
    ],
)  # fmt: skip
def test_parameters_of_other_models(changes, total, active):
    params = read(**changes).params
    assert params.total == pytest.approx(total, rel=0.02)
    assert params.active == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize(
    ("quantized", "name"),
    [
        (None, "bf16"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "int8"),
    ],
)
def test_precisions(quantized, name):
    assert read(quantization_config=quantized).weight_bits.name == name


def test_a_type_that_is_no_name():
    assert read(model_type=[]).params == read().params


@pytest.mark.parametrize(
    "quantized", [{"quant_method": "modelopt"}, "fp8", {"quant_method": "gptq", "bits": 3}, {"quant_method": []}]
)
def test_an_unknown_precision_has_to_be_given(quantized):
    with pytest.raises(InputError, match="which plan does not know; give --weights, one of bf16"):
        read(quantization_config=quantized)
    found = read_config(LLAMA | {"quantization_config": quantized}, name="it", weights="int8")
    assert (found.weight_bits.name, found.weights_changed) == ("int8", True)


def test_weights_of_the_file_are_no_change():
    assert not read_config(LLAMA, name="it", weights="bf16").weights_changed
    assert not read_config(LLAMA, name="it").weights_changed
    assert read_config(LLAMA, name="it", weights="fp8").weights_changed


@pytest.mark.parametrize(
    "name", ["qwen3-32b-fp8", "llama-3.1-8bogus", "/nowhere/llama-3.1-8b", "DeepSeek-V3.1", "x" * 5000]
)
def test_names_that_only_look_like_a_built_in_one(name):
    with pytest.raises(InputError, match="is no file"):
        find_model(name)


def test_a_folder_that_may_not_be_searched(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(InputError, match="cannot read /models/llama: Permission denied"):
        find_model("/models/llama")


def test_a_folder_goes_before_a_built_in_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-32b").mkdir()
    (tmp_path / "qwen3-32b" / "config.json").write_text(json.dumps(LLAMA | {"_repo": None}))
    model = find_model("qwen3-32b")
    assert (model.attention[0].count, model.repo) == (32, str(tmp_path / "qwen3-32b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "it is BertModel; expected a model that generates text"),
        ({"is_encoder_decoder": True}, "expected a model that generates text"),
        ({"num_kv_shared_layers": 4}, "has num_kv_shared_layers, layers or caches that plan does not know"),
        ({"index_topk": 2048}, "has index_topk"),
        ({"num_hidden_layers": 10**6}, "has 1000000 layers; expected at most 10000"),
        ({"hidden_size": 1}, "has a hidden_size below its 32 heads"),
        ({"layer_types": [*16 * ["linear_attention"], *16 * ["sliding_attention"]]}, "has states and sliding windows"),
    ],
)
def test_models_that_are_not_known(changes, message):
    with pytest.raises(InputError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama-70b", "llama-3.1-70b"),
        ("Qwen/Qwen3.5-397B-A17B", "qwen3.5-397b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_names_of_built_in_models(name, found):
    assert find_model(name).name == found


def test_a_file_and_a_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({k: v for k, v in LLAMA.items() if k[0] != "_"}))
    for given in (folder, folder / "config.json"):
        model = find_model(str(given))
        assert (model.name, model.repo) == ("my-model", str(folder))
        assert model.attention == find_model("llama-3.1-8b").attention


def test_precision_of_the_weights():
    assert find_model("gpt-oss-120b").weight_bits.experts == 4.25
    assert find_model("deepseek-v3").weight_bits.name == "fp8"
    assert find_model("deepseek-v3", weights="bf16").weight_nbytes() == pytest.approx(2 * 671e9, rel=0.01)
    eight = find_model("llama-3.1-8b", weights="fp8")
    assert eight.weight_nbytes() == pytest.approx(8.03e9 + 128256 * 8192, rel=0.001)
    assert set(WEIGHTS) >= {"bf16", "fp8"}


def test_ranks_copy_the_weights_of_the_attention():
    model = find_model("llama-3.1-8b")
    assert model.weight_nbytes(attention_copies=3) - model.weight_nbytes() == 2 * 2 * model.params.attention


def test_kinds_of_layers():
    def kinds(**changes):
        return [(a.count, a.window) for a in read(num_hidden_layers=6, **changes).attention]

    assert kinds() == [(6, 0)]
    types = [*2 * ["sliding_attention"], "full_attention", *3 * ["sliding_attention"]]
    assert kinds(layer_types=types, sliding_window=64) == [(1, 0), (5, 64)]
    assert kinds(sliding_window=64, sliding_window_pattern=3) == [(2, 0), (4, 64)]
    assert kinds(sliding_window=64, use_sliding_window=False) == [(6, 0)]
    assert kinds(sliding_window=64, model_type="gemma3_text") == [(1, 0), (5, 64)]
    assert kinds(sliding_window=64, model_type="gemma2") == [(3, 0), (3, 64)]
    assert kinds(sliding_window=262_144) == [(6, 0)], "longer than the context"
    assert kinds(sliding_window=64, use_sliding_window=True, max_window_layers=4) == [(4, 0), (2, 64)]
    assert kinds(layer_types=6 * ["chunked_attention"]) == [(6, 0)], "tpu-inference keeps full-length KV"


def test_gemma_4_has_other_heads_in_its_full_layers():
    types = 3 * ["sliding_attention", "full_attention"]
    model = read_config(
        {
            "architectures": ["Gemma4ForCausalLM"],
            "text_config": LLAMA
            | {"num_hidden_layers": 6, "layer_types": types, "sliding_window": 40}
            | {"global_head_dim": 512, "num_global_key_value_heads": 4},
        },
        name="it",
    )
    assert [(a.num_kv_heads, a.head_dim, a.window) for a in model.attention] == [(4, 512, 0), (8, 128, 40)]
    assert model.ignores_windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers; expected that of a decoder"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in the config.json of it is 0; expected an integer above 0"),
        ({"num_hidden_layers": "many"}, "is 'many'"),
        ({"hidden_size": -1}, "hidden_size in the config.json of it is -1"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"layer_types": ["full_attention"]}, "has 1 layer_types for 32 layers"),
        ({"layer_types": 32 * ["mamba"]}, "layers of mamba; expected full, sliding-window or linear attention"),
        ({"sliding_window": 64}, r"no layer with full attention \(its layers: sliding_attention\)"),
        ({"layer_types": 32 * ["linear_attention"]}, "has no linear_num_key_heads"),
        ({"num_experts": 8}, "has no num_experts_per_tok"),
        ({"hybrid_override_pattern": "M*"}, "it has hybrid_override_pattern, layers or caches that plan does not know"),
    ],
)
def test_bad_fields_have_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


def test_states_of_an_unknown_type():
    config = QWEN | {"text_config": QWEN["text_config"] | {"mamba_ssm_dtype": "int3"}}
    with pytest.raises(InputError, match="states of 'int3'; expected one of float32"):
        read_config(config, name="it")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"3", b"[" * 100_000])
def test_bad_files_have_one_line(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="JSON"):
        find_model(str(path))


def test_a_file_that_is_too_large(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(5 << 20))
    with pytest.raises(InputError, match=r"has 5242880 bytes; expected the config\.json of a model"):
        find_model(str(path))


def test_an_unknown_name():
    with pytest.raises(InputError, match=r"--model 'gpt-9' is no file; expected a config\.json, or one of deepseek-v3"):
        find_model("gpt-9")
    with pytest.raises(InputError, match="--weights 'fp3'"):
        find_model("llama-3.1-8b", weights="fp3")


def test_the_built_in_models_are_in_the_package():
    """setup.cfg names them, as a wheel has no other files."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    pattern = setup["options.package_data"]["tpu_offload.plan"]
    found = _SHAPES.parent.glob(pattern)
    assert sorted(path.stem for path in found) == built_in_models()
