"""Jitted copies between the KV caches and the host pool: the direct, staged and fused paths."""

from tpu_offload.kernels.buckets import split_into_buckets, usable_buckets
from tpu_offload.kernels.choose import choose_paths, make_copiers
from tpu_offload.kernels.copier import ArenaView, BlockMoves, Copier, Flight, Phase, fetch_early
from tpu_offload.kernels.direct import DirectCopier, direct_spec
from tpu_offload.kernels.fused import FusedCopies, FusedInputs, FusedOutcome, FusedStep
from tpu_offload.kernels.fused_plan import (
    BySegment,
    FusedPlanner,
    fused_sizes,
    fused_step_structs,
    make_fused_step,
    take_chunks,
)
from tpu_offload.kernels.payload_choice import make_slot_copiers, rank_slot_paths
from tpu_offload.kernels.payload_paths import SLOT_PATHS, HbmPath, HostPath, SlotPath
from tpu_offload.kernels.payloads import SlotCopier
from tpu_offload.kernels.rank_parts import Part, part_of_rank
from tpu_offload.kernels.spec import TransferSpec
from tpu_offload.kernels.staged import StagedCopier

__all__ = [
    "SLOT_PATHS",
    "ArenaView",
    "BlockMoves",
    "BySegment",
    "Copier",
    "DirectCopier",
    "Flight",
    "FusedCopies",
    "FusedInputs",
    "FusedOutcome",
    "FusedPlanner",
    "FusedStep",
    "HbmPath",
    "HostPath",
    "Part",
    "Phase",
    "SlotCopier",
    "SlotPath",
    "StagedCopier",
    "TransferSpec",
    "choose_paths",
    "direct_spec",
    "fetch_early",
    "fused_sizes",
    "fused_step_structs",
    "make_copiers",
    "make_fused_step",
    "make_slot_copiers",
    "part_of_rank",
    "rank_slot_paths",
    "split_into_buckets",
    "take_chunks",
    "usable_buckets",
]
