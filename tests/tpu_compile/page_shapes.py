"""Page shapes that engines have, for the TPU compiler: which copies of them stay within how much HBM."""

import dataclasses
from typing import Any

from tests.tpu_compile.harness import Case


@dataclasses.dataclass(frozen=True)
class Pages:
    """Caches of one page shape.

    Attributes:
      name: where they occur.
      shape: global shape of a page, with blocks of 16 tokens; small ones have more layers.
      dtype: element type.
      order: axes of the caches in memory, from major to minor; empty for the default of their shape.
      tp: devices that the axis 1 of the page is split over, if more than one can be.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    order: tuple[int, ...] = ()
    tp: tuple[int, ...] = (1, 4)
    num_layers: int = 8


PAGES = (
    # vLLM-TPU: [block, 2 * heads / packing, packing, head], heads padded to 128, K and V of 64 side by side.
    Pages("vLLM-TPU, head 128", (16, 8, 2, 128)),
    Pages("vLLM-TPU, head 256", (16, 4, 2, 256)),
    Pages("vLLM-TPU, Gemma-4's head 512", (16, 4, 2, 512)),
    Pages("vLLM-TPU, head 64", (16, 4, 2, 128)),
    Pages("vLLM-TPU, head 128, float8", (16, 4, 4, 128), "float8_e4m3fn", num_layers=16),
    Pages("vLLM-TPU, head 64, float8", (16, 4, 4, 128), "float8_e5m2", num_layers=16),
    Pages("vLLM-TPU, head 128, int4", (16, 4, 8, 128), "int4", num_layers=16),
    Pages("vLLM-TPU, latent 576 as 640", (8, 2, 640), tp=(1,), num_layers=16),
    Pages("vLLM-TPU, latent, turned", (576, 128), tp=(1,)),
    Pages("vLLM-TPU, convolution state", (3, 8192), tp=(1,)),
    Pages("vLLM-TPU, linear attention state", (16, 128, 128), "float32", tp=(1,)),
    # Heads that are not padded.
    Pages("head 64", (16, 8, 2, 64), num_layers=16),
    Pages("head 96", (16, 8, 2, 96)),
    Pages("head 192", (16, 8, 2, 192)),
    Pages("head 32, as replay's model", (16, 2, 2, 32), tp=(1,), num_layers=4),
    Pages("head 64, float8", (16, 4, 4, 64), "float8_e5m2", num_layers=32),
    Pages("head 64, int8", (16, 8, 2, 64), "int8", num_layers=32),
    Pages("head 64, int4", (16, 4, 8, 64), "int4", num_layers=64),
    Pages("head 64, float32", (16, 4, 64), "float32", num_layers=16),
    Pages("latent 576", (16, 576), tp=(1,), num_layers=32),
    Pages("latent 576, one head", (16, 1, 576), tp=(1,), num_layers=32),
    Pages("state of 64 x 64", (16, 64, 64), "float32", tp=(1,)),
    Pages("state of 3 x 1000", (3, 1000), "float32", tp=(1,), num_layers=32),
    # Other orders of the axes.
    Pages("[N, block, heads, 128]", (16, 8, 128)),
    Pages("[N, block, heads, 64]", (16, 8, 64), num_layers=32),
    Pages("[N, block, heads, 128], float8", (16, 32, 128), "float8_e4m3fn", tp=(1,)),
    Pages("[N, block, 1, 128]", (16, 1, 128), tp=(1,), num_layers=64),
    Pages("[N, heads, block, 128]", (8, 16, 128), tp=(1,)),
    Pages("[N, heads, block, 64]", (8, 16, 64), tp=(1,), num_layers=32),
    Pages("[N, 2, block, heads, 128]", (2, 16, 8, 128), tp=(1,)),
    Pages("[N, 2, block, heads, 64]", (2, 16, 8, 64), tp=(1,), num_layers=16),
    Pages("[N, everything]", (16384,), tp=(1,), num_layers=16),
    # Larger blocks: the default layout may have the tokens in the lanes, and blocks are contiguous.
    Pages("vLLM-TPU, head 128, blocks of 128", (128, 8, 2, 128)),
    Pages("head 64, blocks of 32", (32, 8, 2, 64), num_layers=16),
    Pages("head 64, blocks of 64", (64, 8, 2, 64)),
    Pages("head 64, 48 layers", (16, 8, 2, 64), tp=(1,), num_layers=48),
    Pages("head 64, blocks of 32, 48 layers", (32, 8, 2, 64), tp=(1,), num_layers=48),
    Pages("head 64, blocks of 64, 48 layers", (64, 8, 2, 64), tp=(1,), num_layers=48),
    Pages("head 192, 32 layers", (16, 8, 2, 192), tp=(1,), num_layers=32),
    Pages("latent 576, blocks of 64, 48 layers", (64, 576), tp=(1,), num_layers=48),
    Pages("head 64, int8, blocks of 32, 32 layers", (32, 8, 2, 64), "int8", tp=(1,), num_layers=32),
    Pages("head 64, float8, blocks of 64, 32 layers", (64, 4, 4, 64), "float8_e5m2", tp=(1,), num_layers=32),
    Pages("head 64, blocks of 128", (128, 8, 2, 64), num_layers=32),
    Pages("head 96, blocks of 128", (128, 8, 2, 96)),
    Pages("head 192, blocks of 128", (128, 8, 2, 192)),
    Pages("head 64, float8, blocks of 128", (128, 4, 4, 64), "float8_e5m2"),
    Pages("head 64, int8, blocks of 128", (128, 8, 2, 64), "int8"),
    Pages("head 64, float32, blocks of 128", (128, 4, 64), "float32"),
    Pages("latent 576, blocks of 128", (128, 576), tp=(1,), num_layers=32),
    Pages("[N, block, heads, 64], blocks of 128", (128, 8, 64), num_layers=32),
    Pages("[N, 2, block, heads, 64], blocks of 128", (2, 128, 8, 64), tp=(1,), num_layers=32),
    # With a Format of their own.
    Pages("head 64, row-major, blocks of 128", (128, 8, 2, 64), order=(0, 1, 2, 3, 4), num_layers=16),
    Pages("head 64, float8, row-major, blocks of 128", (128, 4, 4, 64), "float8_e5m2", order=(0, 1, 2, 3, 4)),
    Pages("head 64, row-major", (16, 8, 2, 64), order=(0, 1, 2, 3, 4), num_layers=16),
    Pages("head 192, row-major", (16, 8, 2, 192), order=(0, 1, 2, 3, 4)),
    Pages("latent 576, row-major", (16, 576), order=(0, 1, 2), tp=(1,), num_layers=32),
    Pages("head 64, float8, row-major", (16, 4, 4, 64), "float8_e5m2", order=(0, 1, 2, 3, 4), num_layers=32),
    Pages("head 128, heads outermost", (16, 8, 128), order=(2, 0, 1, 3), tp=(1,)),
    Pages("head 128, blocks innermost", (16, 8, 2, 128), order=(1, 2, 3, 4, 0), tp=(1,)),
)


def case(pages: Pages, topology: str, tp: int = 1, *, num_blocks: int = 520, **more: Any) -> Case:
    """The case; its arrays have sizes that 128 blocks together do not have, so that copies of whole ones are seen."""
    sizes: dict[str, Any] = {"num_layers": pages.num_layers, "segment_blocks": 31, "capacity": 16, "bucket": 5} | more
    shape: dict[str, Any] = {"dtype": pages.dtype, "page_shape": pages.shape, "order": pages.order}
    return Case(topology, tp, num_blocks=num_blocks, **shape, **sizes)
