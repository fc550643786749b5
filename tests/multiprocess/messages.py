"""Messages between the engine and the workers of the rig, and the setup of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpu_offload import KVLayout, StepPlan, StepReport

type Plans = tuple[StepPlan, ...]
"""The plans of one step: one of each data-parallel rank."""

BLOCK_SIZE = 4  # tokens
NUM_LAYERS = 3
MAX_WRITES = 12  # most blocks that one forward pass writes, per layer group
MAX_GROUPS = 3  # with attention
MAX_ROW_WRITES = 12  # most rows of states
ROWS = 2**32  # number of the first row of states where blocks and rows are numbered together
NULL_BLOCK = 0  # where a block table has no block; granted to nobody in models with several groups


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probability of each fault on one process, per opportunity.

    Attributes:
      save: a save raises.
      load: a load raises.
      segment: a save raises and destroys its segment of host memory.
      caches: a load raises and destroys the KV caches.
      slow: a copy is ready at the third or fourth poll of its token, not at the first.
      misplaced: a load permutes its blocks without an error, to test that the rig detects it.
      silence: a step sends no report; a later report has its content.
      storage: a call of a storage tier raises, or finds damaged or missing records.
      frozen: storage does not answer for some steps.
    """

    save: float = 0.0
    load: float = 0.0
    segment: float = 0.0
    caches: float = 0.0
    slow: float = 0.0
    silence: float = 0.0
    misplaced: float = 0.0
    storage: float = 0.0
    frozen: float = 0.0


@dataclasses.dataclass(frozen=True)
class Transport:
    """Probability of each message fault, per message.

    Attributes:
      plan_again: an earlier plan is delivered again, before or in the middle of a step.
      plan_late: a plan is delivered after later ones.
      report_lost: a report never arrives.
      report_again: a report arrives twice.
    """

    plan_again: float = 0.0
    plan_late: float = 0.0
    report_lost: float = 0.0
    report_again: float = 0.0


@dataclasses.dataclass(frozen=True)
class Setup:
    """The setup of one run.

    Attributes:
      seed: random seed.
      num_steps: steps before the engine ends its requests.
      data_ranks: data-parallel ranks, each with an engine, a scheduler and blocks of its own.
      data_ranks_span_hosts: each of them has devices of every process; otherwise of as few as possible.
      num_blocks: blocks in the KV caches, of each data-parallel rank.
      windows: per layer group beside full attention, its sliding window in tokens; all groups share the caches.
      num_rows: rows of states, of each data-parallel rank; 0 for a model without states.
      settings: `OffloadConfig` settings of the scheduler and all workers.
      host_segment_chunks: chunks in a segment of the host pool.
      swap_blocks: size of the swap pool; 0 turns request swap off.
      max_ahead: most steps that the engine plans ahead of the workers' reports; the number is drawn each time.
      faults: faults by process.
      transport: message faults.
      reset: probability that a step begins with a reset.
      restart: probability that a step begins with a restarted worker.
      restart_without_caches: share of restarts that also lose the KV caches.
      settings_of: by process, settings that differ from `settings`.
      available_chunks: by process, capacity of its memory in chunks; by default the configured number.
      worker_ids: by process, worker ids that differ from the process's number.
      num_workers: the scheduler's `num_workers`; None is the number of processes.
      without_lockstep: each process continues copies when they are ready there, to test that the rig detects it.
    """

    seed: int = 0
    num_steps: int = 60
    data_ranks: int = 1
    data_ranks_span_hosts: bool = False
    num_blocks: int = 40
    windows: tuple[int, ...] = ()
    num_rows: int = 0
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
    without_lockstep: bool = False

    @property
    def dispatches_alike(self) -> bool:
        """Whether all processes must dispatch the same copies: no fault happens on one process alone.

        Ready tokens, arrived reports and memory sizes differ between processes in any case, and must not matter.
        """
        fails = any(f.save or f.load or f.segment or f.caches for f in self.faults.values())
        return not (fails or self.transport.plan_late or self.restart or self.settings_of or self.worker_ids)


@dataclasses.dataclass(frozen=True)
class Begin:
    """A process has created the caches and the worker of a run, or failed to.

    Attributes:
      layout: layout of its caches.
      error: the worker's exception, in one line.
    """

    layout: KVLayout | None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward pass of one process, and the plans delivered to it.

    Attributes:
      number: number of the step.
      plans: the plans of the step; None if they have not arrived.
      before: plans delivered before them, each in a step without a forward pass.
      inside: plans delivered again between `begin_step` and the forward pass of this step.
      writes: by block, the seed of the KV that the forward pass writes; by `ROWS` plus row, of the state. Blocks
        and rows of all data-parallel ranks are numbered together.
      expected: likewise, the seed of its contents after the step; None compares nothing.
      known_losses: by process, the losses of its caches that the engine had handled when it planned the step.
      restart: whether the worker restarts before the step.
      without_caches: whether the restart loses the KV caches.
    """

    number: int
    plans: Plans | None
    before: tuple[Plans, ...]
    inside: Plans | None
    writes: Mapping[int, int]
    expected: Mapping[int, int] | None
    known_losses: tuple[int, ...]
    restart: bool = False
    without_caches: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
    """A process's reply to one step.

    Attributes:
      number: number of the step.
      reports: the worker's report, for each data-parallel rank; None in a step without one.
      num_losses: total losses of caches on this process.
      garbage: whether the forward pass computed on caches that some process had lost.
      num_checked: number of blocks compared.
      wrong: (array, block or row, device) of unexpected contents.
    """

    number: int
    reports: tuple[StepReport, ...] | None
    num_losses: int
    garbage: bool
    num_checked: int = 0
    wrong: tuple[tuple[int, int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class End:
    """The copies that a process dispatched in a run: (kind, segment, blocks, step) of each."""

    dispatched: tuple[tuple[str, int, int, int], ...]
