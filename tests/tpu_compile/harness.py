"""Compiles the copy programs with the real TPU compiler, on a machine without a TPU, and reports on them.

Run as a script, in a process of its own (a compiler crash takes the process with it, and libtpu reads
its environment once): `python harness.py '{"topology": "v6e:2x2", "tp": 4, ...}'` prints one JSON
object. From Python, `compile_in_subprocess` does that, and a `Compiler` compiles case after case in one process.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may be compiling too; there is no TPU to share
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# Copies as others do them, or as they were tried here (see `alternatives`).
ALTERNATIVES = (
    "chained_save",
    "page_save",
    "unrolled_save",
    "pallas_save",
    "peer_save",
    "peer_load",
    "untied_fused_step",
)
ALL_PROGRAMS = ("direct_save", "direct_load", "gather", "scatter", "land", "pick", "read_slot", "write_slot")
SLOTS_BY_HBM = ("read_slot_hbm", "write_slot_hbm")
STEPS = ("step", "fused_step")  # a model's forward pass without and with fused copies


@dataclasses.dataclass(frozen=True)
class Case:
    """One cache to compile for.

    Attributes:
      topology: name of a TPU topology, like `v6e:2x2`.
      tp: devices that an axis of the pages is split over.
      split_axis: that axis of the caches: 2 are the heads of attention, 1 those of a recurrent state.
      with_data_axis: whether the block axis names a mesh axis of size 1, as tpu-inference's caches do.
      ranks: data-parallel ranks, each with `num_blocks` blocks on `tp` devices of its own.
      part: the first so many devices are those that one process has of one rank, and the programs are for its part of
        the host tier; 0 for all. They have to be of the first process: of others the compiler drops host memory.
      dtype: element type of the caches.
      page_shape: global shape of a page.
      num_layers, num_blocks: size of the caches.
      order: axes of the caches in device memory, from major to minor; empty for the default of their shape.
      segment_blocks: places in a segment of the host pool.
      capacity: staging budget in blocks.
      bucket: size of the staging arrays.
      programs: which to compile, of ALL_PROGRAMS, SLOTS_BY_HBM, STEPS and ALTERNATIVES.
      num_stripes: arrays in a segment; None as the library chooses.
      num_saves, num_loads, blocks_per_chunk: what the fused step copies.
      d_model, d_ff, num_tokens: sizes of the model's step.
      donate: False compiles without donation, to see what that would cost.
    """

    topology: str
    tp: int
    dtype: str = "bfloat16"
    page_shape: tuple[int, ...] = (128, 8, 2, 128)
    num_layers: int = 32
    num_blocks: int = 512
    order: tuple[int, ...] = ()
    segment_blocks: int = 256
    capacity: int = 128
    bucket: int = 64
    programs: tuple[str, ...] = ALL_PROGRAMS
    num_stripes: int | None = None
    num_saves: int = 0
    num_loads: int = 0
    blocks_per_chunk: int = 1
    d_model: int = 4096
    d_ff: int = 14336
    num_tokens: int = 256
    donate: bool = True
    split_axis: int = 2
    with_data_axis: bool = False
    ranks: int = 1
    part: int = 0


def compile_in_subprocess(cases: list[Case], *, timeout_s: float = 300) -> list[dict[str, Any]]:
    """Compiles all cases in one subprocess; one dict a program, as `measure` returns."""
    compiler = Compiler({})
    try:
        return compiler.compile(cases, timeout_s=timeout_s)
    finally:
        compiler.close()


class Compiler:
    """A subprocess that compiles, started when it is needed, and anew after a crash.

    Its imports and the start of libtpu take longer than a small program.

    Args:
      known: figures by the key of what was compiled (`recorded.key`); such programs are not compiled again.

    Attributes:
      figures: of all programs so far, by key, those that the library tried and dropped included.
    """

    def __init__(self, known: Mapping[str, dict[str, Any]]) -> None:
        self._known = known
        self.figures: dict[str, dict[str, Any]] = {}
        self._child: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def compile(self, cases: list[Case], *, timeout_s: float = 600) -> list[dict[str, Any]]:
        """Compiles all cases; one dict a program, as `measure` returns.

        Raises:
          RuntimeError: the compiler refuses one, crashes or takes longer than `timeout_s`.
        """
        if self._child is None:
            self._child = self._start()
            self._ask(self._child, self._known)
        child = self._child
        assert child.stdout is not None
        self._ask(child, [dataclasses.asdict(case) for case in cases])
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            line = child.stdout.readline() if selector.select(timeout_s) else ""
        if not line.endswith("\n"):
            self._stop()
            self._log.seek(0)
            raise RuntimeError(f"TPU compile of {cases} ended with {child.returncode}:\n{self._log.read()[-4000:]}")
        results: list[dict[str, Any]] = json.loads(line)
        for result in results:
            self.figures.update(result.pop("tried"))
        return results

    def close(self) -> None:
        """Ends the subprocess."""
        self._stop()
        self._log.close()

    @staticmethod
    def _ask(child: subprocess.Popen[str], what: Any) -> None:
        assert child.stdin is not None
        child.stdin.write(json.dumps(what) + "\n")
        child.stdin.flush()

    def _start(self) -> subprocess.Popen[str]:
        repository = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join([repository, environment.get("PYTHONPATH", "")])
        self._log.seek(0)
        self._log.truncate()
        return subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "-"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # a request that a dead child has not read
                    pipe.close()
            self._child = None


def measure(case: Case, known: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Compiles the programs of one case, but for known ones; all sizes are in bytes per device."""
    spec, device_kind, num_devices = describe(case)
    block_nbytes = spec.block_nbytes_per_device
    common = {
        "topology": case.topology,
        "tp": case.tp,
        "dtype": case.dtype,
        "num_layers": case.num_layers,
        "device_kind": device_kind,
        "num_devices": num_devices,
        "num_stripes": len(spec.stripes),
        "block_nbytes": block_nbytes,
        "caches_nbytes": block_nbytes * case.num_blocks,
        "segment_nbytes": block_nbytes * case.segment_blocks,
        "staging_nbytes": block_nbytes * case.bucket,
    }
    return [{"program": name, **common, **library_figures(name, spec, case, known)} for name in case.programs]


def library_figures(name: str, spec: Any, case: Case, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of the program that the library would use, its bound, and under "tried" those of all, by key."""
    from tests.tpu_compile.recorded import Recorded
    from tpu_offload.kernels.compiled import bound_nbytes, compile_program

    bound = bound_nbytes(spec, num_blocks=2 if name.startswith("direct") or name.endswith("_hbm") else 1)
    tried: dict[str, dict[str, Any]] = {}

    def recorded(spec: Any) -> Any:
        return Recorded(build(name, spec, case), case, known, tried)

    start = time.monotonic()
    chosen, _ = compile_program(spec, recorded, bound=bound)
    compile_s = time.monotonic() - start
    return {"bound_nbytes": bound, "compile_s": compile_s, "tried": tried, **chosen.figures}


def describe(case: Case) -> tuple[Any, str, int]:
    """The transfer spec of a case, the kind of its devices, and how many the topology has."""
    import numpy as np
    from jax import ShapeDtypeStruct
    from jax.experimental import topologies
    from jax.experimental.layout import Format, Layout
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    from tpu_offload.kernels import TransferSpec

    topology = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
    devices = topology.devices[: case.ranks * case.tp]
    mesh, blocks = Mesh(np.array(devices), ("model",)), None
    if case.with_data_axis or case.ranks > 1:
        mesh, blocks = Mesh(np.array(devices).reshape(case.ranks, -1), ("data", "model")), "data"
    unsplit = [None] * (case.split_axis - 1)
    sharding: Any = NamedSharding(mesh, PartitionSpec(blocks, *unsplit, "model"))
    if case.tp == case.ranks == 1 and not case.with_data_axis and not set(case.programs) & {*STEPS, *ALTERNATIVES}:
        sharding = SingleDeviceSharding(devices[0], memory_kind="device")
    if case.order:
        sharding = Format(Layout(tuple(case.order)), sharding)
    struct = ShapeDtypeStruct((case.ranks * case.num_blocks, *case.page_shape), np.dtype(case.dtype), sharding=sharding)
    spec = TransferSpec.from_caches(
        [struct] * case.num_layers,
        segment_blocks=case.segment_blocks,
        capacity=case.capacity,
        num_stripes=case.num_stripes,
    )
    if case.part:
        spec = spec.part(devices[: case.part])
    return spec, devices[0].device_kind, len(topology.devices)  # type: ignore[attr-defined]


def build(name: str, spec: Any, case: Case) -> Any:
    """The `programs.Program` of that name."""
    import jax

    from tests.tpu_compile import alternatives, decoder
    from tpu_offload.kernels import FusedStep, fused_step_structs, payload_programs, programs

    if name in ALTERNATIVES and name != "untied_fused_step":
        return getattr(alternatives, name)(spec, case.bucket)
    if name in STEPS or name == "untied_fused_step":
        fused = FusedStep()
        if name != "step":
            fused = fused_step_structs(
                spec, blocks_per_chunk=case.blocks_per_chunk, num_saves=case.num_saves, num_loads=case.num_loads
            )
        sizes = decoder.Sizes(d_model=case.d_model, d_ff=case.d_ff, num_tokens=case.num_tokens)
        args = decoder.structs(spec.cache_structs(), fused, block_size=case.page_shape[0], sizes=sizes)
        step = jax.jit(
            alternatives.untied(decoder.step) if name.startswith("untied") else decoder.step, donate_argnums=(1, 5)
        )
        return programs.Program(name, step, args, "tpu")
    make = getattr(programs if hasattr(programs, name) else payload_programs, name)
    program = make(spec) if name.startswith("direct") else make(spec, case.bucket)
    if not case.donate:
        program = dataclasses.replace(program, function=jax.jit(program.function.__wrapped__))
    return program


def main() -> None:
    if sys.argv[1] != "-":
        print(answer(sys.argv[1], {}))
        return
    # What libtpu prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    known = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        answers.write(answer(line, known) + "\n")
        answers.flush()


def answer(asked: str, known: Mapping[str, dict[str, Any]]) -> str:
    """What `measure` returns for each of the cases, as JSON in and out."""
    cases = json.loads(asked)
    cases = [Case(**c) for c in (cases if isinstance(cases, list) else [cases])]
    fixed = [dataclasses.replace(c, page_shape=tuple(c.page_shape), programs=tuple(c.programs)) for c in cases]
    return json.dumps([result for case in fixed for result in measure(case, known)])


if __name__ == "__main__":
    main()
