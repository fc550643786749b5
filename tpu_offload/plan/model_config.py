"""Reads a Hugging Face `config.json` into a `ModelShape`.

The built-in models are such files, with the fields that matter (folder `shapes`). Fields that begin with `_` are ours:
the repository, and the published numbers of parameters, which tests compare with the computed ones.
"""

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_offload.errors import InputError
from tpu_offload.plan.model import WEIGHT_BITS, AttentionLayers, ModelShape, Parameters, StateLayers
from tpu_offload.values import as_count, one_line

_SHAPES = Path(__file__).with_name("shapes")
_MAX_NBYTES = 4 << 20
# tpu-inference 0.32 runs these with models of its own, which give every layer KV of full length.
_JAX_MODELS_WITH_WINDOWS = frozenset({"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"})
_SSM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANT_METHODS = {"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8"}  # others say how many bits they have
_BY_BITS = {4: "int4", 8: "int8", 16: "bf16"}
_MAX_LAYERS = 10_000
# Layers or caches that are not computed here: a plan without them would be wrong.
_UNKNOWN_FIELDS = (
    "attn_type_list", "hybrid_layer_pattern", "hybrid_override_pattern", "index_topk", "mamba_d_state",
    "num_kv_shared_layers",
)  # fmt: skip
# By type of model: how many layers form a pattern that ends with full attention, where the file does not say.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
_UNGATED = frozenset({"bloom", "codegen", "falcon", "gpt2", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2"})
_TIED = ("gemma", "gpt2", "opt", "bloom", "falcon", "cohere")  # types of models that tie unless the file says otherwise
_DECODERS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
WEIGHTS = tuple(WEIGHT_BITS)


def built_in_models() -> list[str]:
    """Names of the models whose shape the package has."""
    return sorted(path.stem for path in _SHAPES.glob("*.json"))


def find_model(name: str, *, weights: str | None = None) -> ModelShape:
    """A built-in model, or the one of a `config.json`.

    Args:
      name: a name of `built_in_models`, in any case, or the path of a `config.json` or of the folder that has it.
      weights: precision of the weights, one of `WEIGHTS`; None is what the file says.
    Raises:
      InputError: it is neither, or the file does not describe a model that is known here.
    """
    path = Path(name)
    try:
        if path.is_dir():
            path /= "config.json"
        is_file = path.is_file()
    except OSError as e:
        if e.errno != errno.ENAMETOOLONG:
            raise InputError(f"cannot read {path}: {e.strerror or e}") from e
        is_file = False
    if not is_file:
        path = _built_in(name) or path
        if path.parent != _SHAPES:
            raise InputError(
                f"--model {name!r} is no file; expected a config.json, or one of {', '.join(built_in_models())}"
            )
    config = _read_json(path)
    folder = path.resolve().parent
    given = path.stem if path.name != "config.json" else folder.name
    return read_config(config, name=given, repo=str(folder), weights=weights)


def _read_json(path: Path) -> Any:
    try:
        nbytes = path.stat().st_size
        content = path.read_bytes() if nbytes <= _MAX_NBYTES else b""
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}") from e
    if nbytes > _MAX_NBYTES:
        raise InputError(f"{path} has {nbytes} bytes; expected the config.json of a model")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is not JSON; expected the config.json of a model") from e


def _built_in(name: str) -> Path | None:
    """The file of a built-in model, by its name, with or without a version, or by its repository."""
    wanted = name.lower()
    for path in sorted(_SHAPES.glob("*.json")):
        repo = str(json.loads(path.read_bytes())["_repo"]).lower()
        if wanted in (path.stem, path.stem.replace("-3.1", ""), repo, repo.partition("/")[2]):
            return path
    return None


def read_config(config: Any, *, name: str, repo: str = "", weights: str | None = None) -> ModelShape:
    """The model of a parsed `config.json`.

    Args:
      config: the parsed file.
      name: what to call the model.
      repo: what `vllm serve` gets, unless the file names it.
      weights: as in `find_model`.
    Raises:
      InputError: a field is missing or has no sensible value, or the model has layers of an unknown kind.
    """
    if not isinstance(config, Mapping):
        raise InputError(f"the config.json of {name} is a {type(config).__name__}; expected a JSON object")
    text = config.get("text_config")
    fields = _Fields(text if isinstance(text, Mapping) else config, name=name)
    given = config.get("architectures")
    architectures = [str(one) for one in given] if isinstance(given, list) else []
    _check_known(fields, config, architectures)
    ignores_windows = bool(_JAX_MODELS_WITH_WINDOWS.intersection(architectures))
    kinds = _layer_kinds(fields)
    attention = _attention(fields, kinds)
    states = _states(fields, kinds.count("linear_attention"))
    if not any(layers.window == 0 for layers in attention):
        raise InputError(
            f"{name} has no layer with full attention (its layers: {', '.join(sorted(set(kinds)))}), which the host "
            "tier needs"
        )
    quantized = config.get("quantization_config") or fields.get("quantization_config")
    precision = weights or _precision(quantized, name)
    if precision not in WEIGHT_BITS:
        raise InputError(f"--weights {precision!r}; expected one of {', '.join(WEIGHTS)}")
    return ModelShape(
        name=name,
        repo=str(config.get("_repo") or repo),
        params=_parameters(fields, kinds, attention, states),
        weight_bits=WEIGHT_BITS[precision],
        attention=attention,
        states=states,
        max_tokens=fields.number("max_position_embeddings"),
        ignores_windows=ignores_windows,
        weights_changed=weights is not None and weights != _own_precision(quantized, name),
    )


class _Fields:
    """The fields of a model, with one clear line for each that is missing or no number."""

    def __init__(self, fields: Mapping[str, Any], *, name: str) -> None:
        self._fields, self.name = fields, name

    def get(self, field: str) -> Any:
        """The value, None if there is none."""
        return self._fields.get(field)

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that the file has, as an integer above 0.

        Raises:
          InputError: there is none and no default, or it is something else.
        """
        for field in names:
            value = self._fields.get(field)
            if value is None:
                continue
            number = as_count(value)
            if not number or number > 10**9:
                raise InputError(
                    f"{field} in the config.json of {self.name} is {one_line(value)}; expected an integer above 0"
                )
            return number
        if default is None:
            raise InputError(f"the config.json of {self.name} has no {' or '.join(names)}; expected that of a decoder")
        return default


def _check_known(fields: _Fields, config: Mapping[str, Any], architectures: Sequence[str]) -> None:
    """Refuses models that are no decoders, or have what is not computed here."""
    if config.get("is_encoder_decoder") or (architectures and not architectures[0].endswith(_DECODERS)):
        what = ", ".join(architectures) or "an encoder and a decoder"
        raise InputError(f"{fields.name} is {what}; expected a model that generates text, such as LlamaForCausalLM")
    for field in _UNKNOWN_FIELDS:
        if fields.get(field):
            raise InputError(f"{fields.name} has {field}, layers or caches that plan does not know")


def _own_precision(quantized: Any, name: str) -> str | None:
    try:
        return _precision(quantized, name)
    except InputError:  # of a kind that is not known
        return None


def _precision(quantized: Any, name: str) -> str:
    """The name of the weights' precision."""
    if quantized is None:
        return "bf16"
    given = quantized if isinstance(quantized, Mapping) else {}
    method = str(given.get("quant_method"))
    if method in _QUANT_METHODS:
        return _QUANT_METHODS[method]
    bits = as_count(given.get("bits") or given.get("w_bit"))
    groups = given.get("config_groups")
    if isinstance(groups, Mapping):
        found = [one.get("weights") for one in groups.values() if isinstance(one, Mapping)]
        bits = next((as_count(one.get("num_bits")) for one in found if isinstance(one, Mapping)), bits)
    if bits not in _BY_BITS:
        raise InputError(
            f"{name} has the quantization_config {one_line(quantized)}, which plan does not know; give --weights, one "
            f"of {', '.join(WEIGHTS)}"
        )
    return _BY_BITS[bits]


def _layer_kinds(fields: _Fields) -> list[str]:
    """Per layer, `full_attention`, `sliding_attention` or `linear_attention`."""
    num_layers = fields.number("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise InputError(f"{fields.name} has {num_layers} layers; expected at most {_MAX_LAYERS}")
    given = fields.get("layer_types")
    if isinstance(given, list):
        kinds = [str(kind) for kind in given]
        if len(kinds) != num_layers:
            raise InputError(f"the config.json of {fields.name} has {len(kinds)} layer_types for {num_layers} layers")
    elif fields.get("full_attention_interval"):
        every = fields.number("full_attention_interval")
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    else:
        kinds = _window_kinds(fields, num_layers)
    # Layers of chunked attention have KV of full length in tpu-inference 0.32.
    kinds = ["full_attention" if kind == "chunked_attention" else kind for kind in kinds]
    unknown = set(kinds) - {"full_attention", "sliding_attention", "linear_attention"}
    if unknown:
        what = ", ".join(sorted(unknown))
        raise InputError(f"{fields.name} has layers of {what}; expected full, sliding-window or linear attention")
    if {"linear_attention", "sliding_attention"} <= set(kinds):
        raise InputError(f"{fields.name} has states and sliding windows, which the connector does not run in one model")
    return kinds


def _window_kinds(fields: _Fields, num_layers: int) -> list[str]:
    """The kinds of a model whose file has a window, or none, in place of `layer_types`."""
    window = as_count(fields.get("sliding_window"))
    if not window or fields.get("use_sliding_window") is False or window >= fields.number("max_position_embeddings"):
        return ["full_attention"] * num_layers
    if fields.get("use_sliding_window") and fields.get("max_window_layers") is not None:
        first = as_count(fields.get("max_window_layers")) or 0  # layers before have full attention
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern")
    every = as_count(pattern) or _PATTERNS.get(str(fields.get("model_type")), 0)
    return ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]


def _attention(fields: _Fields, kinds: Sequence[str]) -> tuple[AttentionLayers, ...]:
    num_heads = fields.number("num_attention_heads")
    if fields.get("kv_lora_rank"):
        rope = fields.number("qk_rope_head_dim")
        return (
            AttentionLayers(
                count=len(kinds),
                num_heads=num_heads,
                qk_width=fields.number("qk_nope_head_dim") + rope,  # a prefill decompresses the latent
                v_width=fields.number("v_head_dim"),
                num_kv_heads=1,
                head_dim=0,
                latent_widths=(fields.number("kv_lora_rank"), rope),
            ),
        )
    head_dim = fields.number("head_dim", default=fields.number("hidden_size") // num_heads)
    if not head_dim:
        raise InputError(f"{fields.name} has a hidden_size below its {num_heads} heads; expected a multiple of them")
    num_kv_heads = fields.number("num_key_value_heads", default=num_heads)
    found = []
    for kind in ("full_attention", "sliding_attention"):
        if kind not in kinds:
            continue
        is_full = kind == "full_attention"
        width = fields.number("global_head_dim", default=head_dim) if is_full else head_dim
        heads = fields.number("num_global_key_value_heads", default=num_kv_heads) if is_full else num_kv_heads
        found.append(
            AttentionLayers(
                count=kinds.count(kind),
                num_heads=num_heads,
                qk_width=width,
                v_width=width,
                num_kv_heads=heads,
                head_dim=width,
                window=0 if is_full else fields.number("sliding_window"),
            )
        )
    return tuple(found)


def _states(fields: _Fields, count: int) -> StateLayers | None:
    if not count:
        return None
    key_heads, value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    key_dim, value_dim = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
    dtype = fields.get("mamba_ssm_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in _SSM_NBYTES:
        raise InputError(f"{fields.name} has states of {one_line(dtype)}; expected one of {', '.join(_SSM_NBYTES)}")
    return StateLayers(
        count=count,
        conv_shape=(fields.number("linear_conv_kernel_dim") - 1, 2 * key_heads * key_dim + value_heads * value_dim),
        ssm_shape=(value_heads, value_dim, key_dim),
        conv_nbytes=2,
        ssm_nbytes=_SSM_NBYTES[dtype],
    )


def _parameters(
    fields: _Fields, kinds: Sequence[str], attention: Sequence[AttentionLayers], states: StateLayers | None
) -> Parameters:
    """Counts the weights of all matrices; norms and biases are too few to count."""
    hidden, num_layers = fields.number("hidden_size"), len(kinds)
    of_attention = sum(layers.count * _attention_params(fields, layers, hidden) for layers in attention)
    if states is not None:
        conv_dim, values = states.conv_shape[1], states.ssm_shape[0] * states.ssm_shape[1]
        # To queries, keys and values; the gate; two numbers a head; the convolution; and back.
        layer = hidden * (conv_dim + values + 2 * states.ssm_shape[0]) + 4 * conv_dim + values * hidden
        of_attention += states.count * layer
    dense, experts, active = _mlp_params(fields, hidden, num_layers)
    model_type = str(fields.get("model_type"))
    tied = fields.get("tie_word_embeddings")
    copies = 1 if (model_type.startswith(_TIED) if tied is None else tied) else 2
    return Parameters(
        embedding=float(copies * fields.number("vocab_size") * hidden),
        attention=float(of_attention),
        dense=float(dense),
        experts=float(experts),
        active_experts=float(active),
    )


def _mlp_params(fields: _Fields, hidden: int, num_layers: int) -> tuple[int, int, int]:
    """Weights of perceptrons: of those that every token uses, of routed experts, and of the experts of one token."""
    matrices = 2 if str(fields.get("model_type")) in _UNGATED else 3
    num_experts = fields.number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    if num_experts == 1:
        return num_layers * matrices * hidden * fields.number("intermediate_size", "ffn_dim", "n_inner"), 0, 0
    num_dense = min(num_layers, as_count(fields.get("first_k_dense_replace")) or 0)
    if every := as_count(fields.get("interleave_moe_layer_step")):
        num_dense = num_layers - num_layers // every
    num_sparse = num_layers - num_dense
    expert = 3 * hidden * fields.number("moe_intermediate_size", "intermediate_size")
    shared = 3 * hidden * (as_count(fields.get("shared_expert_intermediate_size")) or 0)
    shared += expert * (as_count(fields.get("n_shared_experts")) or 0)
    if fields.get("intermediate_size_mlp"):  # Llama 4, each of whose sparse layers has a shared expert
        shared += expert
    dense = num_sparse * (shared + hidden * num_experts)
    if num_dense:
        dense += num_dense * 3 * hidden * fields.number("intermediate_size_mlp", "intermediate_size")
    used = min(num_experts, fields.number("num_experts_per_tok", "num_experts_per_token", "top_k_experts"))
    return dense, num_sparse * num_experts * expert, num_sparse * used * expert


def _attention_params(fields: _Fields, layers: AttentionLayers, hidden: int) -> int:
    """Weights of one layer of attention."""
    out = layers.num_heads * layers.v_width * hidden
    if layers.latent_widths:
        latent, rope = layers.latent_widths
        queries = layers.num_heads * layers.qk_width
        rank = as_count(fields.get("q_lora_rank"))
        of_queries = rank * (hidden + queries) if rank else hidden * queries
        return (
            of_queries
            + hidden * (latent + rope)
            + latent * layers.num_heads * (layers.qk_width - rope + layers.v_width)
            + out
        )
    gate = 2 if fields.get("attn_output_gate") else 1
    return hidden * layers.head_dim * (gate * layers.num_heads + 2 * layers.num_kv_heads) + out
