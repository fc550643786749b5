"""A tiny Qwen3 with random weights, a tokenizer with one word per token, and a chat template.

    python scripts/vllm_cpu/tiny_model.py DIR

The weights are large enough that the next token depends on all previous tokens. With vLLM's small dummy weights it
depends only on the last one, so a wrong KV cache would not change the answers.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

NUM_WORDS = 1024  # tokens 0 to 2 are special, token 17 is the word "w17"
EOS = 2
_HIDDEN, _INTERMEDIATE, _HEADS, _HEAD_DIM = 256, 512, 2, 128
_SCALE = 0.12  # vLLM's is 0.02


def make(folder: Path, *, num_layers: int = 2) -> None:
    """Writes the model in Hugging Face format, in bfloat16; deterministic."""
    folder.mkdir(parents=True, exist_ok=True)
    random, end = np.random.default_rng(0), 0
    header: dict[str, object] = {}
    tensors: list[bytes] = []
    for name, shape in _shapes(num_layers).items():
        values = np.ones(shape) if len(shape) == 1 else _SCALE * random.standard_normal(shape)
        tensors.append(values.astype(ml_dtypes.bfloat16).tobytes())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + len(tensors[-1])]}
    # safetensors: the length of a JSON header, the header, the bytes of the tensors.
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(b"".join([len(head).to_bytes(8, "little"), head, *tensors]))
    config = _CONFIG | {"num_hidden_layers": num_layers, "max_window_layers": num_layers}
    for name, content in (("config", config), ("tokenizer", _tokenizer()), ("tokenizer_config", _TOKENIZER_CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(content))


_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE, "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS, "head_dim": _HEAD_DIM, "vocab_size": NUM_WORDS, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": EOS, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
    "chat_template": "{% for m in messages %}{{m['content']}} {% endfor %}",
}  # fmt: skip


def _shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (NUM_WORDS, _HIDDEN)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (_HIDDEN,)
        for part in "qkv":
            shapes[f"{at}self_attn.{part}_proj.weight"] = (_HEADS * _HEAD_DIM, _HIDDEN)
        for part in "qk":
            shapes[f"{at}self_attn.{part}_norm.weight"] = (_HEAD_DIM,)
        shapes[f"{at}self_attn.o_proj.weight"] = (_HIDDEN, _HEADS * _HEAD_DIM)
        for part in ("gate", "up"):
            shapes[f"{at}mlp.{part}_proj.weight"] = (_INTERMEDIATE, _HIDDEN)
        shapes[f"{at}mlp.down_proj.weight"] = (_HIDDEN, _INTERMEDIATE)
    return shapes | {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (NUM_WORDS, _HIDDEN)}


def _tokenizer() -> dict[str, object]:
    special = ["<unk>", "<s>", "</s>"]
    words = special + [f"w{i}" for i in range(len(special), NUM_WORDS)]
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **marks} for i, word in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }


if __name__ == "__main__":
    make(Path(sys.argv[1]))
