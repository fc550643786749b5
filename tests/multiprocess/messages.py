"""What the engine and the workers of the rig say to each other, and what a life is made of."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpu_offload import KVLayout, StepPlan, StepReport

BLOCK_SIZE = 4  # tokens
NUM_LAYERS = 3
MAX_WRITES = 12  # blocks that one forward pass writes


@dataclasses.dataclass(frozen=True)
class Faults:
    """How likely each fault is on one process, each time that it may happen.

    Attributes:
      save: a save raises.
      load: a load raises.
      segment: a save raises and takes its segment of host memory along.
      caches: a load raises and takes the KV caches along.
      slow: a copy is over at the third or fourth look at its token, not at the first.
      misplaced: a load puts its blocks in each other's places, and says nothing; what the rig is there to find.
      silence: a step ends without a report; what it would have said comes with a later one.
    """

    save: float = 0.0
    load: float = 0.0
    segment: float = 0.0
    caches: float = 0.0
    slow: float = 0.0
    silence: float = 0.0
    misplaced: float = 0.0


@dataclasses.dataclass(frozen=True)
class Transport:
    """How likely each fault of the messages is, for each message.

    Attributes:
      plan_again: an earlier plan is delivered once more, before a step or in the middle of one.
      plan_late: a plan is missing in its step and is delivered after later ones.
      report_lost: a report never arrives.
      report_again: a report arrives twice.
    """

    plan_again: float = 0.0
    plan_late: float = 0.0
    report_lost: float = 0.0
    report_again: float = 0.0


@dataclasses.dataclass(frozen=True)
class Setup:
    """One life.

    Attributes:
      seed: of everything that is drawn.
      num_steps: steps before the engine comes to its end.
      num_blocks: of the KV caches.
      settings: of `OffloadConfig`, for the scheduler and all workers.
      host_segment_chunks: chunks in a segment of the host pool.
      swap_blocks: size of the swap pool; 0 turns request swap off.
      max_ahead: the engine plans up to so many steps ahead of the workers' reports, each time as many as it draws.
      faults: by process.
      transport: faults of the messages.
      reset: how likely a step begins with a reset.
      restart: how likely a step begins with a worker that was started anew.
      restart_without_caches: the share of those in which its KV caches are gone, too.
      settings_of: by process, settings that differ there.
      available_chunks: by process, how many chunks its memory can hold; as many as the settings ask for by default.
      worker_ids: by process, where they are not its number.
      num_workers: what the scheduler is told; None is the number of processes.
    """

    seed: int = 0
    num_steps: int = 60
    num_blocks: int = 40
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    host_segment_chunks: int = 4
    swap_blocks: int = 0
    max_ahead: int = 3
    faults: Mapping[int, Faults] = dataclasses.field(default_factory=dict)
    transport: Transport = Transport()
    reset: float = 0.0
    restart: float = 0.0
    restart_without_caches: float = 0.0
    settings_of: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    available_chunks: Mapping[int, int] = dataclasses.field(default_factory=dict)
    worker_ids: Mapping[int, int] = dataclasses.field(default_factory=dict)
    num_workers: int | None = None

    @property
    def dispatches_alike(self) -> bool:
        """Whether all processes have to dispatch the same copies: nothing goes wrong on only one of them.

        Which tokens are ready, which reports arrive and how much memory there is differs between processes in any
        case, and may not matter.
        """
        fails = any(f.save or f.load or f.segment or f.caches for f in self.faults.values())
        return not (fails or self.transport.plan_late or self.restart or self.settings_of or self.worker_ids)


@dataclasses.dataclass(frozen=True)
class Begin:
    """A process has built the caches and the worker of a life, or could not.

    Attributes:
      layout: of its caches.
      error: what the worker raised, in one line.
    """

    layout: KVLayout | None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward pass of one process, and the plans that reach it.

    Attributes:
      number: of the step.
      plan: the plan of the step; None if it has not arrived.
      before: plans delivered before it, each for a step without a forward pass.
      inside: a plan delivered once more between `begin_step` and the forward pass of this step.
      writes: by block, the seed of the KV that the forward pass writes.
      expected: by block, the seed of the KV that is there after the step; None compares nothing.
      known_losses: by process, the losses of its caches that the engine had acted on when it planned the step.
      restart: the worker is started anew before the step.
      without_caches: its KV caches are gone, too.
    """

    number: int
    plan: StepPlan | None
    before: tuple[StepPlan, ...]
    inside: StepPlan | None
    writes: Mapping[int, int]
    expected: Mapping[int, int] | None
    known_losses: tuple[int, ...]
    restart: bool = False
    without_caches: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a process says of one step.

    Attributes:
      number: of the step.
      report: of the worker; None in a step without one.
      num_losses: how often this process has lost its caches, in all.
      garbage: the forward pass computed on caches of which a part, on some process, was lost.
      num_checked: blocks compared.
      wrong: those that do not hold what is expected, as (layer, block, device).
    """

    number: int
    report: StepReport | None
    num_losses: int
    garbage: bool
    num_checked: int = 0
    wrong: tuple[tuple[int, int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class End:
    """What a process has dispatched in a life: (what, segment, blocks, step) of each copy."""

    dispatched: tuple[tuple[str, int, int, int], ...]
