"""What kinds of models, engines and loads there are random runs of."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mode:
    """What all runs of a mode have in common.

    Attributes:
      sync_load: loads run right before the step that needs them. vLLM has no way to report that one has failed if there
        are several KV cache groups, so the connector refuses it with windows or states.
      is_async: asynchronous scheduling.
      has_drafts: speculative decoding.
      has_stages: pipeline stages.
      has_windows: one or two groups with sliding windows beside full attention.
      has_states: two groups with states beside full attention.
      mixed_heads: pages of two shapes in the one group of full attention.
    """

    sync_load: bool = False
    is_async: bool = False
    has_drafts: bool = False
    has_stages: bool = False
    has_windows: bool = False
    has_states: bool = False
    mixed_heads: bool = False

    @property
    def has_groups(self) -> bool:
        """Whether there are several KV cache groups."""
        return self.has_windows or self.has_states


# "sync" refers to loads, "async" to scheduling.
MODES = {
    "plain": Mode(),
    "sync": Mode(sync_load=True),
    "async": Mode(is_async=True),
    "sync-async": Mode(sync_load=True, is_async=True),
    "drafts": Mode(has_drafts=True),
    "stages": Mode(has_stages=True),
    "stages-sync": Mode(has_stages=True, sync_load=True),
    "mixed-heads": Mode(mixed_heads=True),
    "mixed-heads-sync-async": Mode(mixed_heads=True, sync_load=True, is_async=True),
    "states": Mode(has_states=True),
    "states-async": Mode(has_states=True, is_async=True),
    "windows": Mode(has_windows=True),
    "windows-async": Mode(has_windows=True, is_async=True),
    "windows-drafts": Mode(has_windows=True, has_drafts=True),
}
