"""What does the TPU compiler make of the copy programs: HBM, DMAs, how many in flight, code, time?

Needs no TPU: `libtpu` from the package index contains the compiler. Every case compiles in a subprocess.

  python benchmarks/bench_tpu_compile.py                                  # the sweep, some minutes
  python benchmarks/bench_tpu_compile.py --generations v6e --layers 32 --tp 4
  python benchmarks/bench_tpu_compile.py --fused                          # copies inside a model's step
  python benchmarks/bench_tpu_compile.py --alternatives                   # the peer's programs, dropped alternatives
  python benchmarks/bench_tpu_compile.py --page-shapes --generations v6e  # every page shape that engines have
  python benchmarks/bench_tpu_compile.py --states                         # states of linear attention

Columns: blocks in a job (any: one program serves every size); HBM of the program beside its arguments, in blocks,
including outputs; host memory of its arguments in MiB per device; DMAs to or from host memory per block of the job;
bytes of the smallest of them; how many are in flight at once in the schedule; copies of whole arrays (must be 0); code
size; compile time. For steps: the share of the saved and loaded bytes that moves while matrix products run, and the
HBM beyond that of the plain step.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from common import count, make_parser, print_table, write_json

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.tpu_compile import states
from tests.tpu_compile.harness import ALL_PROGRAMS, Case, compile_in_subprocess
from tests.tpu_compile.page_shapes import PAGES as PAGE_SHAPES
from tests.tpu_compile.page_shapes import case as page_case

# A topology with enough devices, by generation and tensor parallelism.
TOPOLOGIES = {
    "v5e": {1: "v5e:2x2", 4: "v5e:2x2", 8: "v5e:2x4"},
    "v5p": {1: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2"},
    "v6e": {1: "v6e:2x2", 4: "v6e:2x2", 8: "v6e:2x4"},
    "tpu7x": {1: "tpu7x:2x2x1", 4: "tpu7x:2x2x1", 8: "tpu7x:2x2x2"},
}
# K and V heads interleaved, two (bfloat16) or four (float8) packed: 8 KV heads of 128, or 16 in float8.
PAGES = {"bfloat16": (8, 2, 128), "float8_e4m3fn": (8, 4, 128)}
STAGED = ("gather", "scatter")
ALTERNATIVES = ("chained_save", "page_save", "unrolled_save", "pallas_save", "peer_save", "peer_load")


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The sweep: (case, programs) with the table's text for the blocks in a job."""
    for generation in args.generations:
        if args.page_shapes is not None:
            yield from page_cases(generation, args)
            continue
        if args.states is not None:
            yield from state_cases(generation, args)
            continue
        for tp in args.tp:
            for dtype in args.dtypes:
                for num_layers in args.layers:
                    case = Case(
                        TOPOLOGIES[generation][tp],
                        tp,
                        dtype=dtype,
                        page_shape=(args.block_size, *PAGES[dtype]),
                        num_layers=num_layers,
                        num_blocks=250,  # a size that no other array has, to recognize copies of whole caches
                        capacity=max(args.blocks),
                    )
                    yield from with_programs(case, args)


def page_cases(generation: str, args: argparse.Namespace) -> Iterator[Case]:
    for pages in PAGE_SHAPES:
        if args.page_shapes and not any(part in pages.name for part in args.page_shapes):
            continue
        for tp in set(pages.tp) & set(args.tp):
            topology = TOPOLOGIES[generation][tp]
            yield page_case(pages, topology, tp, num_blocks=args.num_blocks, programs=tuple(args.programs))


def state_cases(generation: str, args: argparse.Namespace) -> Iterator[Case]:
    for name, model in states.MODELS.items():
        for tp in set(model.tp) & set(args.tp):
            for array in states.ARRAYS:
                yield states.case(TOPOLOGIES[generation][tp], name, tp, array, num_rows=args.states)


def with_programs(case: Case, args: argparse.Namespace) -> Iterator[Case]:
    if args.fused:
        for runs in args.runs:
            yield dataclasses.replace(
                case, d_model=args.d_model, d_ff=7 * args.d_model // 2, num_saves=runs, num_loads=runs,
                programs=("step", "fused_step", "untied_fused_step"),
            )  # fmt: skip
        return
    if args.alternatives:
        for bucket in args.blocks[-1:]:
            for name in ("direct_save", "direct_load", *STAGED, *ALTERNATIVES):
                yield dataclasses.replace(case, bucket=bucket, programs=(name,))
        return
    if "direct" in args.paths:
        yield dataclasses.replace(case, programs=("direct_save", "direct_load"))
    for bucket in args.blocks if "staged" in args.paths else ():
        yield dataclasses.replace(case, bucket=bucket, programs=STAGED)


def rows_of(case: Case) -> list[dict[str, Any]]:
    """The compiler's figures for each program of a case; a crash is a row too."""
    try:
        results = compile_in_subprocess([case], timeout_s=900)
    except Exception as e:
        error = str(e).strip().splitlines()[-1][:160]
        return [{"program": "+".join(case.programs), "error": error, **vars(case)}]
    for result in results if case.segment_blocks in (31, states.SEGMENT_ROWS) else ():  # a page shape, or a state
        result |= {"page_shape": case.page_shape, "order": case.order}
    plain = next((r["temp_nbytes"] for r in results if r["program"] == "step"), 0)
    for result in results:
        result["blocks"] = case.bucket if result["program"] in (*STAGED, "peer_save", "peer_load") else "any"
        if result["program"].endswith("fused_step"):
            result["blocks"] = f"{case.num_saves}+{case.num_loads}"
        own_output = result["output_nbytes"] - result["alias_nbytes"]
        beside = result["temp_nbytes"] - (plain if result["program"].endswith("fused_step") else 0)
        if result["program"].endswith("step"):
            own_output = 0  # logits
        result["hbm_blocks"] = (beside + own_output) / result["block_nbytes"]
        result["host_nbytes"] = result["host_alias_nbytes"] + result["host_temp_nbytes"]
    return results


def cells(row: dict[str, Any]) -> list[str]:
    pages = f" {list(row['page_shape'])}{list(row['order']) or ''}" if "page_shape" in row else ""
    name = [row["topology"], str(row["tp"]), row["dtype"] + pages, str(row["num_layers"]), row["program"]]
    if "error" in row:
        return [*name, "", row["error"], *[""] * 8]
    under = [row["saved_under_compute"], row["loaded_under_compute"]]
    return [
        *name,
        str(row["blocks"]),
        f"{row['block_nbytes'] / 2**20:.2f}",
        f"{row['hbm_blocks']:.2f}",
        f"{row['host_nbytes'] / 2**20:.0f}",
        str(row["num_dmas"]),
        f"{row['dma_nbytes'] / 1024:.0f}",
        str(row["max_dmas_in_flight"]),
        str(len(row["whole_copies"])),
        f"{row['code_nbytes'] / 1024:.0f}",
        f"{row['compile_s']:.1f}",
        " / ".join("-" if math.isnan(share) else f"{share:.2f}" for share in under),
    ]


COLUMNS = (
    "topology", "TP", "dtype", "layers", "program", "blocks", "MiB/block", "HBM blocks", "host MiB", "DMAs",
    "KiB/DMA", "in flight", "copies", "code KiB", "s", "under compute",
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--generations", nargs="+", choices=list(TOPOLOGIES), default=list(TOPOLOGIES))
    parser.add_argument("--tp", nargs="+", type=count, choices=[1, 4, 8], default=[1, 4, 8])
    parser.add_argument("--dtypes", nargs="+", choices=list(PAGES), default=list(PAGES))
    parser.add_argument("--layers", nargs="+", type=count, default=[8, 32, 80])
    parser.add_argument("--paths", nargs="+", choices=["direct", "staged"], default=["direct", "staged"])
    parser.add_argument("--blocks", nargs="+", type=count, default=[1, 64], help="blocks in a job of the staged path")
    parser.add_argument("--block-size", type=count, default=64, help="tokens in a block")
    parser.add_argument("--fused", action="store_true", help="compile a model's step with copies in it")
    parser.add_argument("--runs", nargs="+", type=count, default=[4], help="blocks that a fused step saves, and loads")
    parser.add_argument("--d-model", type=count, default=4096, help="width of the model of the fused step")
    parser.add_argument(
        "--alternatives", action="store_true", help="compile the peer's programs and dropped alternatives"
    )
    parser.add_argument(
        "--page-shapes", nargs="*", metavar="PART", help="compile the table of page shapes, or a part of it"
    )
    parser.add_argument(
        "--states", type=count, nargs="?", const=129, metavar="ROWS", help="compile states with that many rows (129)"
    )
    parser.add_argument(
        "--programs", nargs="+", choices=ALL_PROGRAMS, default=ALL_PROGRAMS, help="programs of --page-shapes"
    )
    parser.add_argument("--num-blocks", type=count, default=520, help="blocks in the caches of --page-shapes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results: list[dict[str, Any]] = []
    todo = list(cases(args))
    for i, case in enumerate(todo, start=1):
        rows = rows_of(case)
        results += rows
        print(f"[{i}/{len(todo)}]", *[" ".join(cells(row)) for row in rows], sep="\n  ", flush=True)
    print_table("What the TPU compiler makes of the programs", COLUMNS, map(cells, results), num_labels=len(COLUMNS))
    failed = [row for row in results if "error" in row]
    # For page shapes only the bound counts: an 8-bit copy inside a fusion is in the text, but not in memory.
    ours = [row for row in results if "peer" not in row["program"] and "page_shape" not in row]
    copies = [row for row in ours if row.get("whole_copies")]
    ours = [row for row in results if row.get("program", "").startswith("direct")]
    if ours:
        print(f"direct: at most {max(row['hbm_blocks'] for row in ours):.2f} blocks of HBM for jobs of any size")
    print(f"{len(results)} programs, {len(failed)} did not compile, {len(copies)} with copies of whole arrays")
    beyond = [row for row in results if "page_shape" in row and row.get("temp_nbytes", 0) > row["bound_nbytes"]]
    if args.page_shapes is not None:
        print(f"{len(beyond)} programs beyond their bound, which the library refuses at start")
    write_json(args, question="tpu compile", results=results)
    return 1 if copies or beyond else 0


if __name__ == "__main__":
    sys.exit(main())
