"""The states of linear attention of models that vLLM-TPU serves, for the TPU compiler.

A state layer has two arrays, which are two page groups: the last inputs of the convolution, bf16[rows, 3, channels],
and the recurrent state, f32[rows, heads, 128, 128]. tpu-inference makes both in the default layout of their shape. For
the convolution that is [3, rows, channels] with 8 rows in a tile, or [rows, 3, channels] padded to 4 where that pads
less, with few rows; a recurrent state is contiguous.
"""

import dataclasses

from tests.tpu_compile.harness import Case

SEGMENT_ROWS = 16  # whole tiles: without flat pages, the compiler would lay out a segment with its rows in the tiles


@dataclasses.dataclass(frozen=True)
class Model:
    """The states of a model.

    Attributes:
      num_layers: state layers.
      convolution, recurrent: global shapes of the pages of both arrays.
      tp: devices that they are plausibly split over.
    """

    num_layers: int
    convolution: tuple[int, ...]
    recurrent: tuple[int, ...]
    tp: tuple[int, ...]


MODELS = {
    "Qwen3.5-397B": Model(45, (3, 12288), (64, 128, 128), (8,)),
    "Qwen3-Next-80B": Model(36, (3, 8192), (32, 128, 128), (4, 8)),
    "Qwen3.5-4B": Model(24, (3, 8192), (32, 128, 128), (1, 4)),
}
ARRAYS = ("convolution", "recurrent")


def case(topology: str, name: str, tp: int, array: str, *, num_rows: int) -> Case:
    """The arrays of one kind, sharded as tpu-inference does."""
    model = MODELS[name]
    return Case(
        topology,
        tp,
        dtype="bfloat16" if array == "convolution" else "float32",
        page_shape=getattr(model, array),
        num_layers=model.num_layers,
        num_blocks=num_rows,
        segment_blocks=SEGMENT_ROWS,
        capacity=num_rows,
        bucket=5,
        programs=("direct_save", "direct_load"),
        split_axis=2 if array == "convolution" else 1,
        with_data_axis=True,
    )
