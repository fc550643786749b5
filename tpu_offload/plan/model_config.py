"""Reads a Hugging Face `config.json` into a `ModelShape`.

The built-in models are such files, with the fields that matter (folder `shapes`). Fields that begin with `_` are ours:
the repository, and the published numbers of parameters, which tests compare with the computed ones.
"""

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
_QUANT_METHODS = {"mxfp4": "mxfp4", "fp8": "fp8", "compressed-tensors": "int8", "awq": "int4", "gptq": "int4"}
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
    path = _built_in(name) or Path(name)
    if path.parent != _SHAPES:
        if path.is_dir():
            path /= "config.json"
        if not path.is_file():
            raise InputError(
                f"--model {name!r} is no file; expected a config.json, or one of {', '.join(built_in_models())}"
            )
    config = _read_json(path)
    given = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return read_config(config, name=given, repo=str(path.parent), weights=weights)


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
    """The file of a built-in model, by its name, the beginning of it, or the name of its repository."""
    wanted = name.lower().rpartition("/")[2]
    found = [path for path in sorted(_SHAPES.glob("*.json")) if wanted.startswith(path.stem)]
    short = [path for path in sorted(_SHAPES.glob("*.json")) if path.stem.replace("-3.1", "") == wanted]
    return next(iter(found + short), None)


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
    architectures = config.get("architectures")
    known = isinstance(architectures, Sequence) and not isinstance(architectures, str)
    ignores_windows = known and bool(_JAX_MODELS_WITH_WINDOWS.intersection(map(str, architectures or ())))
    kinds = _layer_kinds(fields)
    attention = _attention(fields, kinds)
    states = _states(fields, kinds.count("linear_attention"))
    if not any(layers.window == 0 for layers in attention):
        raise InputError(
            f"{name} has no layer with full attention (its layers: {', '.join(sorted(set(kinds)))}), which the host "
            "tier needs"
        )
    quantized = config.get("quantization_config") or fields.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    precision = weights or (_QUANT_METHODS.get(str(method), "bf16") if method else "bf16")
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


def _layer_kinds(fields: _Fields) -> list[str]:
    """Per layer, `full_attention`, `sliding_attention` or `linear_attention`."""
    num_layers = fields.number("num_hidden_layers")
    given = fields.get("layer_types")
    if isinstance(given, list):
        kinds = [str(kind) for kind in given]
        if len(kinds) != num_layers:
            raise InputError(f"the config.json of {fields.name} has {len(kinds)} layer_types for {num_layers} layers")
    elif interval := fields.get("full_attention_interval"):
        every = fields.number("full_attention_interval")
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
        del interval
    elif fields.get("sliding_window") and fields.get("use_sliding_window") is not False:
        every = (
            fields.number("sliding_window_pattern", "_sliding_window_pattern", default=0) if _has_pattern(fields) else 0
        )
        if not every and fields.get("model_type") == "gpt_oss":
            every = 2
        kinds = ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]
    else:
        kinds = ["full_attention"] * num_layers
    # Layers of chunked attention have KV of full length in tpu-inference 0.32.
    kinds = ["full_attention" if kind == "chunked_attention" else kind for kind in kinds]
    unknown = set(kinds) - {"full_attention", "sliding_attention", "linear_attention"}
    if unknown or fields.get("mamba_d_state") or fields.get("hybrid_override_pattern"):
        what = ", ".join(sorted(unknown)) or "Mamba"
        raise InputError(f"{fields.name} has layers of {what}; expected full, sliding-window or linear attention")
    return kinds


def _has_pattern(fields: _Fields) -> bool:
    return bool(fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern"))


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
    head_dim = fields.number("head_dim", default=fields.number("hidden_size", "head_dim") // num_heads)
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
    if dtype not in _SSM_NBYTES:
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
    num_experts = fields.number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    if num_experts == 1:
        dense, experts, active = num_layers * 3 * hidden * fields.number("intermediate_size"), 0, 0
    else:
        num_dense = min(num_layers, as_count(fields.get("first_k_dense_replace")) or 0)
        num_sparse = num_layers - num_dense
        expert = 3 * hidden * fields.number("moe_intermediate_size", "intermediate_size")
        shared = 3 * hidden * (as_count(fields.get("shared_expert_intermediate_size")) or 0)
        shared += expert * (as_count(fields.get("n_shared_experts")) or 0)
        dense = num_sparse * (shared + hidden * num_experts)
        if num_dense:
            dense += num_dense * 3 * hidden * fields.number("intermediate_size")
        experts = num_sparse * num_experts * expert
        active = num_sparse * min(num_experts, fields.number("num_experts_per_tok", "top_k_experts")) * expert
    copies = 1 if fields.get("tie_word_embeddings") else 2
    return Parameters(
        embedding=float(copies * fields.number("vocab_size") * hidden),
        attention=float(of_attention),
        dense=float(dense),
        experts=float(experts),
        active_experts=float(active),
    )


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
