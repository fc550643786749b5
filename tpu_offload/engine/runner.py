"""Owns the weights and the KV caches, and runs the one compiled step program."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_offload.engine.batch import StepInputs, TokenRun, pack
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.model import Decoder
from tpu_offload.engine.sampling import sample


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computes, one row for each run, in order; rows past the runs are garbage.

    Attributes:
      tokens: i32[samples], the sampled next tokens.
      logits: f32[samples, vocab_size] they were sampled from.
    """

    tokens: jax.Array
    logits: jax.Array


# The config stands for the module graph: it hashes in a microsecond where a GraphDef takes a millisecond a
# step, and two engines with one model share the compiled program.
@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    model_config: ModelConfig, weights: nnx.State[Any, Any], kv_caches: list[jax.Array], inputs: StepInputs
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(model_config)))[0]
    logits, kv_caches = nnx.merge(graphdef, weights).forward(kv_caches, inputs)
    return sample(logits, inputs), logits, kv_caches


class ModelRunner:
    """Runs steps. The caches it holds are donated to each step and replaced by the step's output.

    Args:
      model_config: sizes and seed of the model.
      engine_config: number and size of the blocks, and the bounds of a batch.

    Attributes:
      kv_caches: per layer, kv_dtype[num_blocks, *page_shape]. Whoever else donates them (the offload
        worker does) must put the new ones back before the next step.
    """

    def __init__(self, model_config: ModelConfig, engine_config: EngineConfig) -> None:
        self._model_config, self._engine_config = model_config, engine_config
        self._weights = nnx.state(Decoder(model_config))
        shape = (engine_config.num_blocks, *model_config.page_shape(engine_config.block_size))
        # Put on a device by name, as arrays that come back from the offload worker are. Arrays that jax has
        # merely placed there by default count as another kind, and would compile the step once more.
        device = jax.devices()[0]
        self.kv_caches = [
            jax.device_put(jnp.zeros(shape, model_config.kv_dtype), device) for _ in range(model_config.num_layers)
        ]

    def step(self, runs: Sequence[TokenRun]) -> StepOutput:
        """Dispatches the computation of the runs' tokens and KV, and of one token after each run.

        Returns at once, so that what must follow in program order (saves of these blocks) can be
        dispatched behind it; reading the output waits.

        Args:
          runs: what `batch.pack` accepts.
        """
        tokens, logits, self.kv_caches = _step(
            self._model_config, self._weights, self.kv_caches, pack(runs, self._engine_config)
        )
        return StepOutput(tokens, logits)

    def warm_up(self) -> None:
        """Compiles the step program by running it with no tokens; the caches keep their contents."""
        self.step([]).tokens.block_until_ready()
