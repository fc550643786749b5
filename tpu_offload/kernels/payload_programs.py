"""The jitted programs that copy one chunk of the host tier to and from a separate array, a payload, for storage.

  read_slot        segment -> payload     on the host's CPU
  write_slot       payload -> segment     on the host's CPU
  read_slot_hbm    segment -> payload     block by block through HBM
  write_slot_hbm   payload -> segment     block by block through HBM

Segment and payload are both in pinned host memory. For the first two the TPU compiler makes a call of the host, which
takes no HBM and takes a turn in the device's queue, with the device idle beside it. For the other two it makes DMAs:
each byte crosses the bus twice and takes a place in HBM, one or two blocks in all, because the loop reuses it. Which is
faster depends on the machine (`payload_paths`).

As in `programs`, segments are donated to what writes them and updated in place, and each program returns a token.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on

from tpu_offload.kernels.programs import (
    Program,
    Space,
    make_program,
    origin,
    read_rows,
    segment_sharding,
    write_rows,
)
from tpu_offload.kernels.spec import DEVICE_MEMORY_KIND, TransferSpec


def read_slot(spec: TransferSpec, num_blocks: int) -> Program:
    """`(segment, first) -> (payload, token)`, on the host's CPU: copies consecutive blocks to separate arrays.

    Args of the program:
      segment: per stripe, carrier[segment_blocks, layers, *pool_page] in pinned host memory.
      first: i32[], the position of the first of `num_blocks` blocks in the segment.
    """

    def read(segment: Any, first: Any) -> Any:
        def cut(segment: Any, first: Any) -> Any:
            pieces = [
                lax.dynamic_slice(stripe, (first, np.int32(0), *origin(stripe)), (num_blocks, *stripe.shape[1:]))
                for stripe in segment
            ]
            return pieces, first + num_blocks

        spaces = (Space.Host, Space.Device)
        return compute_on(jax.jit(cut), compute_type="device_host", out_memory_spaces=spaces)(segment, first)

    args = (spec.segment_structs(), spec.count_struct())
    return make_program("read_slot", read, args, spec, donate=None, out=_payload_sharding(spec, num_blocks))


def write_slot(spec: TransferSpec, num_blocks: int) -> Program:
    """`(segment, payload, first) -> (segment, token)`, on the host's CPU.

    Args of the program:
      segment: per stripe, carrier[segment_blocks, layers, *pool_page] in pinned host memory; donated.
      payload: per stripe, carrier[num_blocks, layers, *pool_page] in pinned host memory.
      first: i32[], the position of the first block in the segment.
    """

    def write(segment: Any, payload: Any, first: Any) -> Any:
        def put(segment: Any, payload: Any, first: Any) -> Any:
            pairs = zip(segment, payload, strict=True)
            return [write_rows(stripe, piece, first) for stripe, piece in pairs], first + num_blocks

        spaces = (Space.Host, Space.Device)
        on_host = compute_on(jax.jit(put), compute_type="device_host", out_memory_spaces=spaces)
        return on_host(segment, payload, first)

    args = (spec.segment_structs(), spec.payload_structs(num_blocks), spec.count_struct())
    return make_program("write_slot", write, args, spec, donate=0, out=segment_sharding(spec))


def read_slot_hbm(spec: TransferSpec, num_blocks: int) -> Program:
    """As `read_slot`, block by block through HBM."""
    structs = spec.payload_structs(num_blocks)

    def read(segment: Any, first: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            payload, row = carry
            pairs = zip(payload, segment, strict=True)
            return [write_rows(piece, _through_hbm(stripe, row), i) for piece, stripe in pairs], row + 1

        # Of all of it there is an array in host memory only: the compiler makes it there (tests/tpu_compile).
        empty = [_empty(spec, struct) for struct in structs]
        return lax.fori_loop(np.int32(0), np.int32(num_blocks), body, (empty, first))

    args = (spec.segment_structs(), spec.count_struct())
    return make_program("read_slot_hbm", read, args, spec, donate=None, out=_payload_sharding(spec, num_blocks))


def write_slot_hbm(spec: TransferSpec, num_blocks: int) -> Program:
    """As `write_slot`, block by block through HBM."""

    def write(segment: Any, payload: Any, first: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            segment, row = carry
            pairs = zip(segment, payload, strict=True)
            return [write_rows(stripe, _through_hbm(piece, i), row) for stripe, piece in pairs], row + 1

        return lax.fori_loop(np.int32(0), np.int32(num_blocks), body, (list(segment), first))

    args = (spec.segment_structs(), spec.payload_structs(num_blocks), spec.count_struct())
    return make_program("write_slot_hbm", write, args, spec, donate=0, out=segment_sharding(spec))


def _through_hbm(pool: Any, row: Any) -> Any:
    """`pool[row]` with a leading axis of 1, in host memory again."""
    block = jax.device_put(read_rows(pool, row, (0, pool.shape[1])), Space.Device)
    return jax.device_put(block, Space.Host)


def _empty(spec: TransferSpec, struct: jax.ShapeDtypeStruct) -> Any:
    sharding = spec.pool_sharding(DEVICE_MEMORY_KIND) if spec.explicit else None
    return jax.device_put(lax.empty(struct.shape, jnp.dtype(struct.dtype), out_sharding=sharding), Space.Host)


def _payload_sharding(spec: TransferSpec, num_blocks: int) -> list[Any]:
    return [struct.sharding for struct in spec.payload_structs(num_blocks)]
