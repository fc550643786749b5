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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_offload import FusedCopies, FusedInputs, FusedOutcome, FusedStep, KVLayout
from tpu_offload.engine.batch import StepInputs, TokenSpan, pack
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.model import Decoder
from tpu_offload.engine.sampling import logprobs, sample
from tpu_offload.engine.shards import Shards, cache_shardings, cache_specs, check_shards

_MAX_COPIES = 64  # blocks that one program copies within HBM

Array = np.ndarray[Any, Any]
type _Outputs = tuple[jax.Array, jax.Array, jax.Array, list[jax.Array], FusedOutcome | None]


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

    def read(self) -> tuple[Array, Array]:
        """Waits for the step; returns `tokens` and `logprobs`."""
        return np.asarray(self.tokens), np.asarray(self.logprobs)


# The config represents the module graph: it hashes in a microsecond, where a GraphDef takes a millisecond per step,
# # and two engines with one model share the compiled program.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 6))
def _step(
    model_config: ModelConfig,
    mesh: Mesh | None,
    weights: nnx.State[Any, Any],
    kv_caches: list[jax.Array],
    inputs: StepInputs,
    last_tokens: jax.Array,
    segment: Sequence[jax.Array],
    fused: FusedInputs | None,
) -> _Outputs:
    if mesh is None:
        return _compute(model_config, Shards(), weights, kv_caches, inputs, last_tokens, segment, fused)
    specs = cache_specs(model_config)
    compute = jax.shard_map(
        functools.partial(_compute, model_config, Shards(mesh.size)),
        mesh=mesh,
        in_specs=(P(), specs, P(), P(), P(), P()),
        out_specs=(P(), P(), P(), specs, P()),
        check_vma=False,  # it does not see that joined parts are equal everywhere
    )
    outputs: _Outputs = compute(weights, kv_caches, inputs, last_tokens, segment, fused)
    return outputs


def _compute(
    model_config: ModelConfig,
    shards: Shards,
    weights: nnx.State[Any, Any],
    kv_caches: list[jax.Array],
    inputs: StepInputs,
    last_tokens: jax.Array,
    segment: Sequence[jax.Array],
    fused: FusedInputs | None,
) -> _Outputs:
    """The step of one device."""
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(model_config)))[0]
    copies = FusedCopies(segment, fused)
    tokens = jnp.where(inputs.last_rows < 0, inputs.tokens, last_tokens[inputs.last_rows])
    inputs = dataclasses.replace(inputs, tokens=tokens)
    logits, kv_caches = nnx.merge(graphdef, weights).forward(kv_caches, inputs, copies, shards)
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


def random_weights(model_config: ModelConfig) -> Any:
    """The weights of a model, as `nnx.State`: they depend on its config only."""
    return nnx.state(Decoder(model_config))


class ModelRunner:
    """Runs steps. The caches it holds are donated to each step and replaced by the step's output.

    Args:
      model_config: sizes and seed of the model.
      engine_config: number and size of the blocks, and the bounds of a batch.
      mesh: the devices of all hosts, each of which runs the same steps in the same order; None is one device.
    Raises:
      ConfigError: the heads cannot be divided among the devices.

    Attributes:
      kv_caches: per layer of a layer group with attention, kv_dtype[num_blocks + 1, *page_shape]; all these groups
        share them, and the first block is the null block. After them, per layer with states, in layer order, two arrays
        `[num_states + 1, ...]` of `ModelConfig.state_shapes`. Any other donor (the offload worker) must store the new
        ones here before the next step.
    """

    def __init__(self, model_config: ModelConfig, engine_config: EngineConfig, *, mesh: Mesh | None = None) -> None:
        self._model_config, self._engine_config, self._mesh = model_config, engine_config, mesh
        self._weights = random_weights(model_config)
        if mesh is not None:
            check_shards(model_config, mesh.size)
            self._weights = jax.tree.map(self._replicate, self._weights)
        self._programs: dict[tuple[int, int], Any] = {}  # by numbers of saved and loaded runs
        self.kv_caches: list[jax.Array] = []
        self.renew_caches()
        self._last_tokens = self._replicate(np.zeros(self._pack([]).top_ks.shape, np.int32))

    def renew_caches(self) -> None:
        """Makes zeroed caches. Deletes the remains of the old ones first: HBM has no room for both.

        With several hosts each makes its part, without communication.
        """
        for cache in self.kv_caches:
            if not cache.is_deleted():
                cache.delete()
        shapes = cache_shapes(self._model_config, self._engine_config)
        if self._mesh is None:
            # Committed to a device, like arrays that come back from the offload worker. Uncommitted arrays would
            # compile the step once more.
            device = jax.devices()[0]
            self.kv_caches = [jax.device_put(jnp.zeros(shape, dtype), device) for shape, dtype in shapes]
            return
        shardings = cache_shardings(self._model_config, self._mesh)
        self.kv_caches = [
            _sharded_zeros(shape, dtype, sharding) for (shape, dtype), sharding in zip(shapes, shardings, strict=True)
        ]

    def _replicate(self, value: Any) -> jax.Array:
        """An array that every device has whole."""
        if self._mesh is None:
            on_one: jax.Array = jax.device_put(value, jax.devices()[0])
            return on_one
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, NamedSharding(self._mesh, P()), lambda index: value[index])

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
            tokens, chances, logits, self.kv_caches, copied = _step(self._model_config, self._mesh, *args)
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
        places = [self._input(value) for value in (*ids, np.int32(len(copies)))]
        self.kv_caches = [*_copy_blocks(kv, *places), *states]

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
        inputs: StepInputs = jax.tree.map(self._input, pack(spans, self._engine_config, self._model_config))
        return inputs

    def _input(self, value: Any) -> Any:
        """A numpy array of a step's inputs as its program takes it: on one device as it is."""
        return value if self._mesh is None else self._replicate(value)

    def _program(self, fused: FusedStep) -> Any:
        """The step with copies, compiled ahead of time: a call would compile it too, but also copy."""
        assert fused.inputs is not None
        sizes = fused.inputs.num_saves, fused.inputs.num_loads
        if sizes not in self._programs:
            args = self._weights, self.kv_caches, self._pack([]), self._last_tokens, *fused
            lowered = _step.lower(self._model_config, self._mesh, *args)
            self._programs[sizes] = lowered.compile()
        return self._programs[sizes]


def _sharded_zeros(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> jax.Array:
    zeros = jnp.zeros(sharding.shard_shape(shape), dtype)
    parts = [jax.device_put(zeros, device) for device in sharding.mesh.local_devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
