"""After all faults and backoffs: the tier saves new prompts and loads them, and each exactly as far as it should.

The checks during a run find wrong bytes. What is never saved, or never found, has no bytes; it is found here.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.inside.scheduler import chunk_index
from tests.simulation.memory import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

NEW_TOKEN = 2  # this one and larger ones are in no other prompt


def check_works_again(world: "World") -> None:
    """Serves new prompts on an idle scheduler without faults.

    Raises:
      Violation: something is not saved or not loaded, or more than it should.
    """
    setup = world.setup
    if "compute" not in setup.save_on or setup.save_after_sightings > 1:
        return  # a single new prompt is not saved
    size = setup.block_size * setup.blocks_per_chunk
    num_fitting = setup.num_blocks // len(world.engine.groups) * setup.block_size
    if size + 2 > num_fitting:
        return
    prompt = [NEW_TOKEN] * (size + 1)
    if len(world.engine.groups) == 1:
        for what in ("saved", "loaded"):
            _serve(world, prompt, what, setup.blocks_per_chunk)
        return
    checkpoints = _Checkpoints(world)
    if not checkpoints.fit:
        return
    world.counts["checks that checkpoints work again"] += 1
    for _ in range(2):
        _serve(world, prompt)  # closes the breakers: they let the first save and the first load through as probes
    _reset(world)
    boundaries = checkpoints.of(len(prompt), [size])
    _serve(world, prompt, "saved", checkpoints.num_saved(size, boundaries))
    checkpoints.check(len(boundaries))
    _serve(world, prompt, "loaded", checkpoints.num_loaded(max(boundaries, default=0)))
    if 4 * size + 3 <= min(num_fitting, 44):
        _check_full_prompt(world, checkpoints, size)
        _check_next_turn(world, checkpoints, size)
        _check_third_request(world, checkpoints, size)


def _check_full_prompt(world: "World", checkpoints: "_Checkpoints", size: int) -> None:
    """The same prompt, of two full chunks, continues after the first: its last token is computed."""
    _reset(world)
    prompt = [NEW_TOKEN] * (2 * size)
    _serve(world, prompt)
    _serve(world, prompt, "loaded", checkpoints.num_loaded(max(checkpoints.of(len(prompt), [size]), default=0)))


def _check_next_turn(world: "World", checkpoints: "_Checkpoints", size: int) -> None:
    """A conversation of three chunks, of which two are generated, continues where it ended."""
    _reset(world)
    prompt, end = [NEW_TOKEN + 1] * (size + 1), 3 * size + 2
    answer = _serve(world, prompt, max_tokens=end)
    kept = checkpoints.of(len(prompt), [size])
    rolling = checkpoints.of(len(prompt), [2 * size, 3 * size]) if world.setup.decode_save else []
    checkpoints.check(len(kept) + len(rolling[-1:]))
    reached = max(kept + rolling, default=0)
    _serve(world, [*answer, NEW_TOKEN], "loaded", checkpoints.num_loaded(reached))


def _check_third_request(world: "World", checkpoints: "_Checkpoints", size: int) -> None:
    """Three prompts begin with the same chunk: the second leaves a checkpoint after it, which the third uses."""
    _reset(world)
    prompts = [[NEW_TOKEN + 2] * size + [NEW_TOKEN + 3 + i] * (2 * size + 1) for i in range(3)]
    for prompt in prompts[:2]:
        _serve(world, prompt)
    after = checkpoints.of(len(prompts[0]), [size])
    _serve(world, prompts[2], "loaded", checkpoints.num_loaded(max(after, default=0)))


class _Checkpoints:
    """What is to be expected of checkpoints, by the sizes of the run."""

    def __init__(self, world: "World") -> None:
        self._world, self._setup, self._groups = world, world.setup, world.engine.groups
        most = self._num_slots(3 * world.setup.block_size * world.setup.blocks_per_chunk)
        # Of short slots or a small staging buffer nothing is expected.
        staged = world.setup.num_staging_blocks // world.setup.blocks_per_chunk
        stats = world.scheduler.stats()
        has_rows = not world.setup.num_rows or stats.num_host_states >= 6
        self.fit = 8 + 5 * most <= stats.num_host_chunks and 4 + 3 * most <= staged and has_rows

    def of(self, num_prompt_tokens: int, boundaries: Iterable[int]) -> list[int]:
        """Those of these boundaries, in tokens, whose window blocks are there in the step that completes them."""
        return [end for end in boundaries if self._is_there(num_prompt_tokens, end)]

    def num_saved(self, end: int, boundaries: list[int]) -> int:
        """Blocks that are saved of a new prompt with so many tokens in full chunks."""
        size = self._setup.blocks_per_chunk
        pieces = [piece for b in boundaries for group in self._groups[1:] for piece in group.pieces(b, size)]
        return end // self._setup.block_size + sum(map(len, pieces))

    def num_loaded(self, end: int) -> int:
        """Blocks that are loaded of a prefix of so many tokens."""
        return sum(len(group.loaded(0, end // self._setup.block_size)) for group in self._groups) if end else 0

    def check(self, expected: int) -> None:
        """Raises Violation unless there are so many checkpoints."""
        found = len(chunk_index(self._world.scheduler).checkpoints)
        if found != expected:
            raise Violation(f"long after the last fault, there are {found} checkpoints; expected {expected}")

    def _is_there(self, num_prompt_tokens: int, end: int) -> bool:
        start = step_end = 0
        while step_end < end:
            start, most = step_end, num_prompt_tokens - step_end if step_end < num_prompt_tokens else 1
            step_end = self._world.engine.end_of_step(start, start + min(most, self._setup.max_batch), 0)
        size = self._setup.blocks_per_chunk
        return all(
            piece.start >= group.needed(start).start for group in self._groups[1:] for piece in group.pieces(end, size)
        )

    def _num_slots(self, end: int) -> int:
        """Slots of a checkpoint."""
        return sum(len(group.pieces(end, self._setup.blocks_per_chunk)) for group in self._groups[1:])


def _reset(world: "World") -> None:
    """Empties the host tier."""
    world.engine.reset(1)
    world.settle()
    num_left = world.scheduler.stats().num_window_chunks
    if num_left:
        raise Violation(f"after a reset, {num_left} window chunks that nothing holds have slots")


def _serve(world: "World", prompt: list[int], what: str = "", expected: int = 0, *, max_tokens: int = 0) -> list[int]:
    """Serves one request without a prefix cache in HBM; returns all its tokens.

    Raises:
      Violation: other than `expected` blocks are saved or loaded.
    """
    before = world.scheduler.stats()
    world.engine.tables.invalidate()
    request = world.engine.submit(prompt, salt=0, max_tokens=max_tokens or len(prompt) + 1)
    while world.engine.requests:
        world.step(0)
    world.settle()
    if what:
        name = f"{what}_blocks"
        moved = getattr(world.scheduler.stats(), name) - getattr(before, name)
        if moved != expected:
            raise Violation(f"long after the last fault, {moved} blocks of a prompt are {what}; expected {expected}")
    return request.tokens
