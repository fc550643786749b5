"""Names everything in vLLM's configuration that the bytes of a KV block depend on, beside the geometry of the caches.

The host tier dies with its engine, and the name of the model would do. Stored chunks outlive it, so two engines must
have one name only if they compute the same KV from the same tokens: the same weights, read in the same way, by the same
version of the model's code.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tpu_offload.config.environment import read_variable

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".npz")
_NUM_SAMPLES, _SAMPLE_NBYTES = 16, 4096  # of each file of weights
_PACKAGES = ("vllm-tpu", "vllm", "tpu-inference", "tpu_inference")
# Words in the names of tpu-inference's environment variables on which KV depends: the implementation of a model, the
# precision of weights and activations, approximations, and how pages are laid out. Others only change the speed, or the
# order in which numbers are added.
_WORDS = ("MODEL_IMPL", "QUANTIZ", "DTYPE", "APPROX", "RANDOM_ROUTING", "MLA_", "RPA_KERNEL", "SEQ_ON_LANE")
# A kernel reads this one past tpu-inference's list of its variables: experts' outputs are sent as float8.
_UNLISTED = "TPU_MOE_FP8_OUTPUT_COMM"

# Of the settings for images, videos and sounds, those that embeddings depend on. vLLM's hash of an image covers what a
# request sets of these, not what the engine does.
_MEDIA = (
    "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype", "video_pruning_rate",
    "video_pruning_method", "allow_missing_mm_embeddings",
)  # fmt: skip


def model_identity(vllm_config: "VllmConfig") -> str:
    """The model, its revision and what its KV depends on, as text. O(files of weights)."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    load_format = str(vllm_config.load_config.load_format)
    parts = [
        *_of_model(model),
        load_format,
        model.seed if "dummy" in load_format else None,  # dummy weights are random
        # How tpu-inference reads the weights: `quantization` of the additional config is one of its quantizers, Qwix.
        json.dumps(vllm_config.additional_config, sort_keys=True, default=str),
        *_environment(),
        *_versions(),
        # A draft model may have layers of its own in the blocks. N-gram drafts have the model itself here.
        *([draft.model, *_of_model(draft)] if draft is not None and draft.model != model.model else ()),
    ]
    return f"{model.model} {hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"


def _of_model(model: "ModelConfig") -> Iterator[Any]:
    """What is set of one model, and its weights."""
    hf_config = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)  # overrides are applied
    yield model.revision
    yield getattr(model.hf_config, "_commit_hash", None)
    yield str(model.dtype)
    yield model.quantization
    yield hf_config
    # vLLM takes the factors of long contexts for every position if the engine's longest context is one.
    yield model.max_model_len if '"longrope"' in hf_config else None
    yield [str(getattr(model.multimodal_config, name, None)) for name in _MEDIA]
    yield model.model_impl
    yield model.code_revision
    yield from sampled_weights(str(model.model))


def _environment() -> list[tuple[str, str]]:
    """Settings of tpu-inference with which it computes other bits, or orders KV otherwise; defaults included."""
    try:
        from tpu_inference import envs
    except ImportError:
        return []
    listed = [(name, str(getattr(envs, name))) for name in sorted(dir(envs)) if any(word in name for word in _WORDS)]
    return [*listed, (_UNLISTED, read_variable(_UNLISTED).lower())]


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def sampled_weights(path: str) -> Iterator[Any]:
    """Names, sizes and samples of the files in a local directory of weights, which may change under the same name."""
    if not os.path.isdir(path):
        return
    for name in sorted(os.listdir(path)):
        if name.endswith(_WEIGHTS):
            with open(os.path.join(path, name), "rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
                digest = hashlib.blake2b(digest_size=16)
                for i in range(_NUM_SAMPLES):
                    file.seek(i * max(0, nbytes - _SAMPLE_NBYTES) // (_NUM_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_NBYTES))
            yield name, nbytes, digest.hexdigest()
