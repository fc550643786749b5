"""A fake model whose KV is a hash of the tokens, so that the contents of a block can be identified."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from tpu_inference.models.jax.jax_intermediate_tensor import JaxIntermediateTensors
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

BLOCK_SIZE = 8
NUM_LAYERS = 2
PAGE_SHAPE = (BLOCK_SIZE, 2, 8)
NUM_STATES = 2  # layers with a state, if the model has any
STATE_SHAPES = ((2, 8), (2, 3, 8))
VOCABULARY = 97
_ROWS = 32  # per call of the write program


class Prefix:
    """A sequence with a digest of each of its prefixes."""

    def __init__(self, tokens) -> None:
        self.tokens: list[int] = []
        self.digests: list[bytes] = []
        self._chain = b""
        self.extend(tokens)

    def extend(self, tokens) -> None:
        for token in tokens:
            self._chain = hashlib.blake2b(self._chain + token.to_bytes(4, "little"), digest_size=16).digest()
            self.tokens.append(token)
            self.digests.append(self._chain)

    def next_token(self) -> int:
        return next_token(self.digests[-1])


def next_token(digest: bytes) -> int:
    return 3 + int.from_bytes(digest[:4], "little") % VOCABULARY


def kv_of(digest: bytes, rank: int, layer: int) -> np.ndarray:
    raw = hashlib.blake2b(digest + bytes([rank, layer]), digest_size=16).digest()
    return np.frombuffer(raw, np.int8).reshape(PAGE_SHAPE[1:])


def state_of(digest: bytes, rank: int, layer: int, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    raw = hashlib.blake2b(digest + bytes([rank, layer, size]), digest_size=size).digest()
    return np.frombuffer(raw, np.int8).reshape(shape)


@functools.cache
def continued(prompt: tuple[int, ...], num_tokens: int) -> Prefix:
    """A prompt and the tokens that the model generates, `num_tokens` in all."""
    prefix = Prefix(prompt)
    while len(prefix.tokens) < num_tokens:
        prefix.extend([prefix.next_token()])
    return prefix


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

    As in tpu-inference, a layer with a state has a tuple of arrays. A pass reads the state of a request in the row of
    its last computed token, and writes it in that of its last token.

    A pipeline stage has some of the layers. Like tpu-inference's it drops the connector's output of a step, unless it
    is the last stage.
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
        self.num_blocks = num_blocks = kv_config.num_blocks
        self.rank = stage  # 0 on every host
        self.is_last_rank = stage == num_stages - 1
        self.process_index = process_index
        self.num_layers = num_layers
        self.devices = [jax.devices()[0]]
        sharding = jax.sharding.SingleDeviceSharding(self.devices[0])
        self.kv_caches = [
            jax.device_put(np.full((num_blocks, *PAGE_SHAPE), -7, np.int8), sharding) for _ in range(num_layers)
        ]
        groups = kv_config.kv_cache_groups
        self.full_group = len(groups) - 1
        self.num_rows = kv_config.mamba_num_blocks if self.full_group else 0
        for _ in range(self.full_group):
            arrays = [np.full((self.num_rows, *shape), -7, np.int8) for shape in STATE_SHAPES]
            self.kv_caches.append(tuple(jax.device_put(array, sharding) for array in arrays))
        self.layer_name_to_kvcache_index = {f"layer{i}": i for i in range(num_layers)}
        self.layer_name_to_kvcache_index |= {f"state{i}": num_layers + i for i in range(NUM_STATES)}
        self.tables: dict[str, list[int]] = {}
        self.row_tables: dict[str, list[int]] = {}
        self.requests: dict[str, object] = {}
        self.input_batch = InputBatch()
        self.num_checked = 0

    def execute_model(self, kv_output):
        activations = JaxIntermediateTensors({})
        activations.kv_connector_output = kv_output
        return None if self.is_last_rank else activations

    def sample_tokens(self, sampled: ModelRunnerOutput) -> ModelRunnerOutput:
        return sampled if self.is_last_rank else EMPTY_MODEL_RUNNER_OUTPUT

    def get_intermediate_tensor_spec(self, scheduler_output):
        return {"hidden_states": scheduler_output.total_num_scheduled_tokens}

    def update_tables(self, output) -> None:
        for tables, group in ((self.tables, self.full_group), *([(self.row_tables, 0)] if self.full_group else [])):
            for new in output.scheduled_new_reqs:
                tables[new.req_id] = list(new.block_ids[group])
            cached = output.scheduled_cached_reqs
            for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if request_id in cached.resumed_req_ids:
                    tables[request_id] = list(block_ids[group])
                elif block_ids is not None:
                    tables[request_id] += block_ids[group]

    def check(self, request_id: str, prefix: Prefix, num_tokens: int) -> bool:
        """Whether the KV that attention reads for the first tokens is right."""
        table, ok = self.tables[request_id], True
        for layer, cache in enumerate(self.kv_caches[: self.num_layers]):
            pages = np.array(cache)
            for position in range(num_tokens):
                found = pages[table[position // BLOCK_SIZE], position % BLOCK_SIZE]
                ok &= bool((found == kv_of(prefix.digests[position], self.process_index, layer)).all())
                self.num_checked += 1
        return ok

    def check_state(self, request_id: str, prefix: Prefix, num_tokens: int) -> bool:
        """Whether the state that the pass begins with is that of the first tokens."""
        ok = True
        if num_tokens:
            row = self.row_tables[request_id][(num_tokens - 1) // BLOCK_SIZE]
            for layer, arrays in enumerate(self.kv_caches[self.num_layers :]):
                for array in arrays:
                    expected = state_of(prefix.digests[num_tokens - 1], self.process_index, layer, array.shape[1:])
                    ok &= bool((np.array(array[row]) == expected).all())
        return ok

    def write_states(self, inputs: dict[str, Prefix]) -> None:
        """Writes the states that a step ends with."""
        names = list(inputs)
        for start in range(0, len(names), _ROWS):
            rows = np.full(_ROWS, self.num_rows, np.int32)
            for layer, arrays in enumerate(self.kv_caches[self.num_layers :]):
                values = [np.zeros((_ROWS, *shape), np.int8) for shape in STATE_SHAPES]
                for i, name in enumerate(names[start : start + _ROWS]):
                    prefix = inputs[name]
                    rows[i] = self.row_tables[name][(len(prefix.tokens) - 1) // BLOCK_SIZE]
                    for value, shape in zip(values, STATE_SHAPES, strict=True):
                        value[i] = state_of(prefix.digests[-1], self.process_index, layer, shape)
                written = _write_states(list(arrays), rows, [jnp.asarray(v) for v in values])
                self.kv_caches[self.num_layers + layer] = tuple(written)

    def write_step(self, starts: dict[str, int], inputs: dict[str, Prefix], wrong: set[str]) -> None:
        """Writes the KV that a step computes, from each request's start on."""
        self.input_batch.fill(inputs)
        rows = []
        for request_id, prefix in inputs.items():
            table = self.tables[request_id]
            for position in range(starts[request_id], len(prefix.tokens)):
                digest = b"wrong" if request_id in wrong else prefix.digests[position]
                rows.append((table[position // BLOCK_SIZE], position % BLOCK_SIZE, digest))
        self.write(rows)

    def write(self, rows) -> None:
        """Writes the KV of (block id, offset, digest)s."""
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            block_ids, offsets = np.full(_ROWS, self.num_blocks, np.int32), np.zeros(_ROWS, np.int32)
            values = [np.zeros((_ROWS, *PAGE_SHAPE[1:]), np.int8) for _ in range(self.num_layers)]
            for i, (block_id, offset, digest) in enumerate(part):
                block_ids[i], offsets[i] = block_id, offset
                for layer in range(self.num_layers):
                    values[layer][i] = kv_of(digest, self.process_index, layer)
            written = _write(self.kv_caches[: self.num_layers], block_ids, offsets, [jnp.asarray(v) for v in values])
            self.kv_caches[: self.num_layers] = written
