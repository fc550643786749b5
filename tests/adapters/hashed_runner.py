"""The fake model's runner: it writes the KV of a pass into jax arrays, and checks what attention would read."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tpu_inference.models.jax.jax_intermediate_tensor import JaxIntermediateTensors
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from tests.adapters.hashed_model import BLOCK_SIZE, NUM_LAYERS, STATE_SHAPES, Prefix, kv_of

NULL_BLOCK = 0
_ROWS = 32  # per call of the write program
_FIRST_STATE = 128  # as a layer; attention has those below


@functools.partial(jax.jit, donate_argnums=0)
def _write(caches, block_ids, offsets, values):
    return [cache.at[block_ids, offsets].set(value, mode="drop") for cache, value in zip(caches, values, strict=True)]


@functools.partial(jax.jit, donate_argnums=0)
def _write_states(states, rows, values):
    return [state.at[rows].set(value, mode="drop") for state, value in zip(states, values, strict=True)]


class InputBatch:
    """The tokens of a pass, in the form of tpu-inference's runner."""

    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.token_ids_cpu = np.zeros((0, 0), np.int32)

    def fill(self, inputs: dict[str, Prefix]) -> None:
        self.req_id_to_index = {request_id: i for i, request_id in enumerate(inputs)}
        longest = max((len(prefix.tokens) for prefix in inputs.values()), default=0)
        self.token_ids_cpu = np.zeros((len(inputs), longest), np.int32)
        for row, prefix in zip(self.token_ids_cpu, inputs.values(), strict=True):
            row[: len(prefix.tokens)] = prefix.tokens


class Runner:
    """The part of tpu-inference's model runner that the connector uses, and the pass itself.

    As in tpu-inference, layer i of every group of attention is in array i: a block belongs to one group at a time. A
    token attends to itself and those before it, in a group with a sliding window to the last of them only. A layer with
    a state has a tuple of arrays. A pass reads the state of a request in the row of its last computed token, and writes
    it in that of its last token.

    A pipeline stage has some of the layers. Like tpu-inference's it drops the connector's output of a step, unless it
    is the last stage.

    Attributes:
      windows: per group of attention, by its place in vLLM's list, the sliding window in tokens; 0 for full attention.
      tables: per request, one block table a group. Like tpu-inference's they are only appended to, so an entry that its
        window has passed may name a block that vLLM has granted to another request since.
      num_checked: positions that attention would have read, in one layer each.
      num_checked_in_windows: those of them in groups with a window that has passed at least one token.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_config: KVCacheConfig,
        *,
        process_index: int,
        num_layers: int = NUM_LAYERS,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        self.vllm_config = config
        self.kv_cache_config = kv_config
        self.num_blocks = kv_config.num_blocks
        self.rank = stage  # 0 on every host
        self.is_last_rank = stage == num_stages - 1
        self.process_index = process_index
        self.num_layers = num_layers
        self.devices = [jax.devices()[0]]
        groups = kv_config.kv_cache_groups
        self.state_groups = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)]
        self.windows: dict[int, int] = {}
        self.layer_name_to_kvcache_index: dict[str, int] = {}
        for i, group in enumerate(groups):
            if i not in self.state_groups:
                spec = group.kv_cache_spec
                self.windows[i] = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
                self.layer_name_to_kvcache_index |= {name: j for j, name in enumerate(group.layer_names[:num_layers])}
        self.page_shapes = _page_shapes(groups[next(iter(self.windows))])[:num_layers]
        self.num_rows = kv_config.mamba_num_blocks if self.state_groups else 0
        self.kv_caches: list[Any] = [self._array(self.num_blocks, shape) for shape in self.page_shapes]
        for i in self.state_groups:
            for name in groups[i].layer_names:
                self.layer_name_to_kvcache_index[name] = len(self.kv_caches)
                self.kv_caches.append(tuple(self._array(self.num_rows, shape) for shape in STATE_SHAPES))
        self.tables: dict[str, list[list[int]]] = {}
        self.requests: dict[str, object] = {}
        self.input_batch = InputBatch()
        self.num_checked = self.num_checked_in_windows = 0

    def _array(self, num_rows: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.device_put(
            np.full((num_rows, *shape), -7, np.int8), jax.sharding.SingleDeviceSharding(self.devices[0])
        )

    def execute_model(self, kv_output):
        activations = JaxIntermediateTensors({})
        activations.kv_connector_output = kv_output
        return None if self.is_last_rank else activations

    def sample_tokens(self, sampled: ModelRunnerOutput) -> ModelRunnerOutput:
        return sampled if self.is_last_rank else EMPTY_MODEL_RUNNER_OUTPUT

    def get_intermediate_tensor_spec(self, scheduler_output):
        return {"hidden_states": scheduler_output.total_num_scheduled_tokens}

    def update_tables(self, output) -> None:
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(ids) for ids in block_ids]
            elif block_ids is not None:
                for table, ids in zip(self.tables[request_id], block_ids, strict=True):
                    table += ids

    def holds(self, request_id: str, block_ids: set[int]) -> bool:
        """Whether a table of attention names one of these blocks."""
        return any(not block_ids.isdisjoint(self.tables[request_id][group]) for group in self.windows)

    def check(self, request_id: str, prefix: Prefix, num_tokens: int) -> bool:
        """Whether the KV of computed tokens that attention reads is right.

        Args:
          request_id: the request.
          prefix: its tokens.
          num_tokens: how many are computed. The next one, which reads most, attends to the window that it ends.
        """
        ok = True
        pages = [np.array(cache) for cache in self.kv_caches[: self.num_layers]]
        for group, window in self.windows.items():
            first = max(0, num_tokens - window + 1) if window else 0
            positions = np.arange(first, num_tokens)
            block_ids = self._blocks_at(request_id, group, positions)
            for layer, shape in enumerate(self.page_shapes):
                found = pages[layer][block_ids, positions % BLOCK_SIZE]
                for kv, position in zip(found, positions, strict=True):
                    expected = self._kv(prefix.digests[position], group, layer, shape[1:])
                    ok &= kv.tobytes() == expected.tobytes()
            num_checked = len(positions) * self.num_layers
            self.num_checked += num_checked
            self.num_checked_in_windows += num_checked if first else 0
        return ok

    def _blocks_at(self, request_id: str, group: int, positions: np.ndarray) -> np.ndarray:
        """The blocks of these positions, all of which the request must hold."""
        block_ids = np.array(self.tables[request_id][group], np.int32)[positions // BLOCK_SIZE]
        assert (block_ids != NULL_BLOCK).all(), (
            f"{request_id}: group {group} has the null block at {positions[block_ids == NULL_BLOCK].tolist()}"
        )
        return block_ids

    def _kv(self, digest: bytes, group: int, layer: int, shape: tuple[int, ...]) -> np.ndarray:
        return kv_of(digest, self.process_index, group * NUM_LAYERS + layer, shape)

    def check_state(self, request_id: str, prefix: Prefix, num_tokens: int) -> bool:
        """Whether the state that the pass begins with is that of the first tokens."""
        ok = True
        if num_tokens:
            row = self._row(request_id, num_tokens)
            for layer, arrays in enumerate(self.kv_caches[self.num_layers :]):
                for array in arrays:
                    expected = self._state(prefix.digests[num_tokens - 1], layer, array.shape[1:])
                    ok &= bool((np.array(array[row]) == expected).all())
        return ok

    def _state(self, digest: bytes, layer: int, shape: tuple[int, ...]) -> np.ndarray:
        return kv_of(digest, self.process_index, _FIRST_STATE + layer, shape)

    def _row(self, request_id: str, num_tokens: int) -> int:
        """The row of the state after so many tokens, the same for all layers."""
        return self.tables[request_id][self.state_groups[0]][(num_tokens - 1) // BLOCK_SIZE]

    def write_states(self, inputs: dict[str, Prefix]) -> None:
        """Writes the states that a step ends with."""
        names = list(inputs)
        for start in range(0, len(names), _ROWS):
            rows = np.full(_ROWS, self.num_rows, np.int32)
            for layer, arrays in enumerate(self.kv_caches[self.num_layers :]):
                values = [np.zeros((_ROWS, *shape), np.int8) for shape in STATE_SHAPES]
                for i, name in enumerate(names[start : start + _ROWS]):
                    prefix = inputs[name]
                    rows[i] = self._row(name, len(prefix.tokens))
                    for value, shape in zip(values, STATE_SHAPES, strict=True):
                        value[i] = self._state(prefix.digests[-1], layer, shape)
                written = _write_states(list(arrays), rows, [jnp.asarray(v) for v in values])
                self.kv_caches[self.num_layers + layer] = tuple(written)

    def write_step(self, starts: dict[str, int], inputs: dict[str, Prefix], wrong: set[str]) -> None:
        """Writes the KV that a step computes, from each request's start on."""
        self.input_batch.fill(inputs)
        rows = []
        for request_id, prefix in inputs.items():
            positions = np.arange(starts[request_id], len(prefix.tokens))
            for group in self.windows:
                for block_id, position in zip(
                    self._blocks_at(request_id, group, positions), positions.tolist(), strict=True
                ):
                    digest = b"wrong" if request_id in wrong else prefix.digests[position]
                    rows.append((group, block_id, position % BLOCK_SIZE, digest))
        self._write(rows)

    def _write(self, rows: list[tuple[int, int, int, bytes]]) -> None:
        """Writes the KV of (group, block id, offset, digest)s."""
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            block_ids, offsets = np.full(_ROWS, self.num_blocks, np.int32), np.zeros(_ROWS, np.int32)
            values = [np.zeros((_ROWS, *shape[1:]), np.int8) for shape in self.page_shapes]
            for i, (group, block_id, offset, digest) in enumerate(part):
                block_ids[i], offsets[i] = block_id, offset
                for layer, shape in enumerate(self.page_shapes):
                    values[layer][i] = self._kv(digest, group, layer, shape[1:])
            written = _write(self.kv_caches[: self.num_layers], block_ids, offsets, [jnp.asarray(v) for v in values])
            self.kv_caches[: self.num_layers] = written


def _page_shapes(group) -> list[tuple[int, ...]]:
    """The shape of a page in each array: two heads for K and V, of the size that vLLM knows."""
    spec = group.kv_cache_spec
    of_layers = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return [(BLOCK_SIZE, 2, of_layers.get(name, spec).head_size) for name in group.layer_names]
