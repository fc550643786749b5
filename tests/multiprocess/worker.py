"""One process of the rig: `python -m tests.multiprocess.worker RANK NUM_PROCESSES NUM_DEVICES PORT FD`.

It executes the runs that the engine's process requests, one after the other, step by step.
"""

import faulthandler
import functools
import os
import random
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import jax

from tests.inside.worker import set_lockstep
from tests.multiprocess.device import Device
from tests.multiprocess.faulty import DispatchLog
from tests.multiprocess.messages import Begin, End, Faults, Plans, Reply, Setup, Step
from tests.multiprocess.settings import available_nbytes, make_config
from tests.multiprocess.stepped_storage import SteppedStorage
from tpu_offload import CachesLostError, OffloadError, OffloadWorker, RankPlans, StepPlan, StepReport
from tpu_offload.engine.host_process import join_hosts
from tpu_offload.kernels.programs import Program


def compile_once() -> None:
    """Caches the compiled programs of a worker for the workers of later runs."""
    compiled: dict[tuple[str, ...], Any] = {}
    compile_program = Program.compile

    def compile_or_find(program: Program) -> Any:
        meshes = [arg.sharding.mesh.device_ids.tolist() for arg in jax.tree.leaves(program.args)]
        # Shapes do not tell the order of the devices, and arguments not how many blocks a slot has.
        results = jax.eval_shape(program.function, *program.args) if "slot" in program.name else None
        key = program.name, repr(program.args), repr(meshes), repr(results)
        if key not in compiled:
            compiled[key] = compile_program(program)
        return compiled[key]

    Program.compile = compile_or_find  # type: ignore[assignment]


class WorkerRun:
    """The worker, the caches and the steps of one run on this process."""

    def __init__(self, setup: Setup, rank: int, device: Device) -> None:
        self.setup = setup
        self.rank = rank
        self.device = device
        self.caches = device.make_caches(setup)
        self.layout = device.layout(setup, self.caches)
        self.log = DispatchLog(setup.faults.get(rank, Faults()), random.Random(f"{setup.seed} faults of {rank}"))
        self.num_losses = 0
        self.incarnation = 0
        self.storage = SteppedStorage(self.log.faults.storage, self.log.faults.frozen, seed=f"{setup.seed} {rank}")
        self.worker = self._start_worker()

    def step(self, step: Step) -> Reply:
        """Executes one step, with its faults."""
        self.log.step = step.number
        if step.restart:
            self._restart(without_caches=step.without_caches, known_losses=step.known_losses[self.rank])
        for plans in step.before:
            if begun := self._begin(plans):
                self.worker.end_step(begun, self.caches)
        begun = self._begin(step.plans)
        again = self._begin(step.inside)
        lost = self.num_losses > step.known_losses[self.rank]
        self.caches, garbage = self.device.forward(self.caches, step.writes, garbage=lost)
        for plan in begun, again:
            if plan is not None:
                self.worker.end_step(plan, self.caches)
        return self._reply(step, garbage)

    def close(self) -> End:
        self.storage.end()
        self.worker.close()
        return End(tuple(self.log.dispatched))

    def _reply(self, step: Step, garbage: bool) -> Reply:
        reports: tuple[StepReport, ...] | None = None
        self.storage.step(self.worker)
        if not self.log.happens(self.log.faults.silence):
            report = self.worker.poll()
            reports = (report,) if self.setup.data_ranks == 1 else tuple(self.ranks.split(report))
        num_checked, wrong = self.device.wrong_blocks(self.caches, step.expected or {})
        return Reply(step.number, reports, self.num_losses, garbage, num_checked, wrong)

    def _begin(self, plans: Plans | None) -> StepPlan | None:
        """Begins the step; returns its plan if it can continue: not if its caches were lost."""
        if plans is None:
            return None
        plan = plans[0] if self.setup.data_ranks == 1 else self.ranks.merge(plans)
        try:
            self.caches = self.worker.begin_step(plan, self.caches)
        except CachesLostError:
            self._lose_caches()
            return None
        return plan

    def _lose_caches(self) -> None:
        self.num_losses += 1
        self.caches = self.device.renew(self.caches)

    def _restart(self, *, without_caches: bool, known_losses: int) -> None:
        self.storage.end()
        self.worker.close()
        if without_caches:
            self._lose_caches()
        self.worker = self._start_worker()
        if self.num_losses > known_losses:  # the new worker does not know of the loss
            self.worker.mark_caches_lost()

    def _start_worker(self) -> OffloadWorker:
        self.incarnation += 1
        self.ranks = RankPlans(self.setup.data_ranks)
        config = make_config(self.setup, self.layout, self.rank)
        worker = OffloadWorker(
            config,
            self.layout,
            self.caches,
            worker_id=self.setup.worker_ids.get(self.rank, self.rank),
            clock=lambda: float(self.log.step),
            available=available_nbytes(self.setup, self.layout, self.rank),
            wrap_copier=self.log.wrap,
            incarnation=self.incarnation,
        )
        worker.wait_until_allocated()
        if self.setup.without_lockstep and worker.num_host_chunks:
            set_lockstep(worker, False)
        return worker


def serve(rank: int, engine: "Connection[Any, Any]") -> None:
    """Executes runs until the engine closes the connection."""
    device_of = functools.cache(Device)
    run: WorkerRun | None = None
    while True:
        try:
            message = engine.recv()
        except EOFError:
            return
        if isinstance(message, Setup):
            try:
                run = WorkerRun(message, rank, device_of(message.data_ranks, message.data_ranks_span_hosts))
                engine.send(Begin(run.layout))
            except OffloadError as e:
                run = None
                engine.send(Begin(None, f"{type(e).__name__}: {e}"))
        elif isinstance(message, Step):
            assert run is not None
            engine.send(run.step(message))
        else:
            engine.send(run.close() if run is not None else End(()))
            run = None


def main() -> None:
    rank, num_processes, num_devices, port, fd = map(int, sys.argv[1:])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    join_hosts(rank, num_processes, num_devices=num_devices, port=port)
    try:
        compile_once()
        engine: Connection[Any, Any] = Connection(fd)
        engine.send("ready")
        serve(rank, engine)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)  # other processes wait in a collective, which would block a clean shutdown
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
