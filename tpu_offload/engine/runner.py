"""Owns the weights and the KV caches, and runs the one compiled step program."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from tpu_offload import FusedCopies, FusedInputs, FusedOutcome, FusedStep, KVLayout
from tpu_offload.engine.batch import StepInputs, TokenSpan, pack
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.model import Decoder
from tpu_offload.engine.sampling import logprobs, sample

_MAX_COPIES = 64  # blocks that one program copies within HBM


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """The outputs of a step, one row per span, in order; further rows are garbage.

    Attributes:
      tokens: i32[samples], the sampled next tokens.
      logprobs: f32[samples], their log-probabilities under softmax(logits), without temperature.
      logits: f32[samples, vocab_size] they were sampled from.
      copied: the results of fused copies; None without any.
    """

    tokens: jax.Array
    logprobs: jax.Array
    logits: jax.Array
    copied: FusedOutcome | None


# The config represents the module graph: it hashes in a microsecond, where a GraphDef takes a millisecond per step,
# # and two engines with one model share the compiled program.
@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 5))
def _step(
    model_config: ModelConfig,
    weights: nnx.State[Any, Any],
    kv_caches: list[jax.Array],
    inputs: StepInputs,
    last_tokens: jax.Array,
    segment: Sequence[jax.Array],
    fused: FusedInputs | None,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array], FusedOutcome | None]:
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(model_config)))[0]
    copies = FusedCopies(segment, fused)
    tokens = jnp.where(inputs.last_rows < 0, inputs.tokens, last_tokens[inputs.last_rows])
    inputs = dataclasses.replace(inputs, tokens=tokens)
    logits, kv_caches = nnx.merge(graphdef, weights).forward(kv_caches, inputs, copies)
    tokens = sample(logits, inputs)
    return tokens, logprobs(logits, tokens, inputs), logits, kv_caches, copies.finish()


@functools.partial(jax.jit, donate_argnums=0)
def _copy_blocks(kv_caches: list[jax.Array], sources: jax.Array, targets: jax.Array, num_blocks: jax.Array) -> Any:
    def copy(i: jax.Array, kv_caches: list[jax.Array]) -> list[jax.Array]:
        blocks = [lax.dynamic_slice_in_dim(cache, sources[i], 1) for cache in kv_caches]
        return [
            lax.dynamic_update_slice_in_dim(cache, block, targets[i], 0)
            for cache, block in zip(kv_caches, blocks, strict=True)
        ]

    return lax.fori_loop(0, num_blocks, copy, kv_caches)


def cache_shapes(model_config: ModelConfig, engine_config: EngineConfig) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the arrays of `ModelRunner.kv_caches`."""
    page = engine_config.num_blocks + 1, *model_config.page_shape(engine_config.block_size)
    num_rows = engine_config.num_state_rows + 1
    states = [((num_rows, *shape), dtype) for shape, dtype in model_config.state_shapes]
    return [*[(page, model_config.kv_dtype)] * model_config.num_arrays, *states]


def cache_layout(model_config: ModelConfig, engine_config: EngineConfig, kv_caches: Sequence[Any]) -> KVLayout:
    """Describes `ModelRunner.kv_caches`, or shape structs with a sharding in their place."""
    num_arrays = model_config.num_arrays
    return KVLayout.from_caches(
        kv_caches,
        block_size=engine_config.block_size,
        model=model_config.name,
        groups=[(window, range(num_arrays)) for window in model_config.group_windows],
        states=range(num_arrays, len(kv_caches)),
        null_block=NULL_BLOCK,
    )


class ModelRunner:
    """Runs steps. The caches it holds are donated to each step and replaced by the step's output.

    Args:
      model_config: sizes and seed of the model.
      engine_config: number and size of the blocks, and the bounds of a batch.

    Attributes:
      kv_caches: per layer of a layer group with attention, kv_dtype[num_blocks + 1, *page_shape]; all these groups
        share them, and the first block is the null block. After them, per layer with states, in layer order, two arrays
        `[num_states + 1, ...]` of `ModelConfig.state_shapes`. Any other donor (the offload worker) must store the new
        ones here before the next step.
    """

    def __init__(self, model_config: ModelConfig, engine_config: EngineConfig) -> None:
        self._model_config, self._engine_config = model_config, engine_config
        self._weights = nnx.state(Decoder(model_config))
        self._programs: dict[tuple[int, int], Any] = {}  # by numbers of saved and loaded runs
        self.kv_caches: list[jax.Array] = []
        self.renew_caches()
        self._last_tokens = jax.device_put(jnp.zeros_like(self._pack([]).top_ks), jax.devices()[0])

    def renew_caches(self) -> None:
        """Makes zeroed caches. Deletes the remains of the old ones first: HBM has no room for both."""
        for cache in self.kv_caches:
            if not cache.is_deleted():
                cache.delete()
        # Committed to a device, like arrays that come back from the offload worker. Uncommitted arrays would compile
        # the step once more.
        device = jax.devices()[0]
        self.kv_caches = [
            jax.device_put(jnp.zeros(shape, dtype), device)
            for shape, dtype in cache_shapes(self._model_config, self._engine_config)
        ]

    def step(self, spans: Sequence[TokenSpan], fused: FusedStep | None = None) -> StepOutput:
        """Dispatches the computation of the spans' tokens and KV, and of one token after each span.

        Returns without waiting, so that saves of these blocks can be dispatched after it in program order; reading the
        output waits.

        Args:
          spans: as for `batch.pack`.
          fused: copies to run under the layers' compute; its segment is donated.
        """
        fused = fused or FusedStep()
        args = self._weights, self.kv_caches, self._pack(spans), self._last_tokens, *fused
        if fused.inputs is None:
            tokens, chances, logits, self.kv_caches, copied = _step(self._model_config, *args)
        else:
            tokens, chances, logits, self.kv_caches, copied = self._program(fused)(*args)
        self._last_tokens = tokens
        return StepOutput(tokens, chances, logits, copied)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Dispatches copies of blocks with KV within HBM, in this order.

        Args:
          copies: block to read, block to write.
        """
        for start in range(0, len(copies), _MAX_COPIES):
            self._copy_blocks(copies[start : start + _MAX_COPIES])

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        ids = np.zeros((2, _MAX_COPIES), np.int32)
        ids[:, : len(copies)] = np.array(copies, np.int32).reshape(-1, 2).T
        num_arrays = self._model_config.num_arrays
        kv, states = self.kv_caches[:num_arrays], self.kv_caches[num_arrays:]
        self.kv_caches = [*_copy_blocks(kv, ids[0], ids[1], np.int32(len(copies))), *states]

    def warm_up(self, fused_shapes: Sequence[FusedStep] = ()) -> None:
        """Compiles the step program by running it with no tokens; the caches keep their contents.

        Args:
          fused_shapes: copies to compile it for as well. Those programs are not run: they would copy.
        """
        last_tokens = self._last_tokens  # a step may be in flight
        self.step([]).tokens.block_until_ready()
        self._last_tokens = last_tokens
        self._copy_blocks([])
        for fused in fused_shapes:
            self._program(fused)

    def _pack(self, spans: Sequence[TokenSpan]) -> StepInputs:
        return pack(spans, self._engine_config, self._model_config)

    def _program(self, fused: FusedStep) -> Any:
        """The step with copies, compiled ahead of time: a call would compile it too, but also copy."""
        assert fused.inputs is not None
        sizes = fused.inputs.num_saves, fused.inputs.num_loads
        if sizes not in self._programs:
            args = self._weights, self.kv_caches, self._pack([]), self._last_tokens, *fused
            lowered = _step.lower(self._model_config, *args)
            self._programs[sizes] = lowered.compile()
        return self._programs[sizes]
