"""The block tables of the simulated engine: grants, shares and frees blocks of all layer groups."""

from collections.abc import Callable, Sequence
from typing import final

from tests.simulation.blocks import BlockPool, CacheKey
from tests.simulation.groups import NULL, Group
from tpu_offload import BlockHash

type Tables = list[list[int]]
type Positions = Sequence[Sequence[int]]
"""Per layer group, positions in its block table, ascending."""
type Found = list[dict[int, int]]
"""Per layer group, blocks by position."""


@final
class BlockTables:
    """Blocks of HBM, and which requests and prefixes have them.

    Args:
      groups: the layer groups.
      pools: what they allocate from.
      on_evict: called for each cached block that is about to be granted.
    """

    def __init__(
        self, groups: Sequence[Group], pools: Sequence[BlockPool], on_evict: Callable[[CacheKey], None]
    ) -> None:
        self.groups = groups
        self.pools = pools
        self._on_evict = on_evict

    def find_prefix(self, hashes: Sequence[BlockHash]) -> Found:
        """The cached blocks of the longest prefix of which each group has what is needed."""
        num_blocks = len(self.pools[0].lookup([(0, block_hash) for block_hash in hashes]))
        while True:
            found = self._find(hashes, num_blocks)
            if found is not None:
                return found
            num_blocks -= 1

    def _find(self, hashes: Sequence[BlockHash], num_blocks: int) -> Found | None:
        """What is needed of a prefix of so many blocks; None if something is not cached."""
        all_found = []
        for group in self.groups:
            positions = group.needed(num_blocks * group.block_size)
            found = {p: self.pools[group.pool].get((group.group_id, hashes[p])) for p in positions}
            if None in found.values():
                return None
            all_found.append({p: block for p, block in found.items() if block is not None})
        return all_found

    def nothing(self) -> Found:
        return [{} for _ in self.groups]

    def num_missing(self, tables: Tables, wanted: Positions) -> list[int]:
        """Per pool, the blocks that these tables lack at these positions."""
        missing = [0] * len(self.pools)
        for group, table, positions in zip(self.groups, tables, wanted, strict=True):
            missing[group.pool] += sum(p >= len(table) or table[p] == NULL for p in positions)
        return missing

    def can_allocate(self, num_blocks: Sequence[int]) -> bool:
        return all(wanted <= pool.num_free for wanted, pool in zip(num_blocks, self.pools, strict=True))

    def grant(self, wanted: Positions, shared: Found) -> Tables | None:
        """New tables with blocks at these positions, some of them shared; None if there are too few."""
        tables: Tables = []
        num_blocks = 1 + max(p for positions in wanted for p in positions)
        held: list[list[int]] = [[] for _ in self.pools]
        for group, positions, found in zip(self.groups, wanted, shared, strict=True):
            tables.append([found.get(p, NULL) for p in range(num_blocks)])
            held[group.pool] += [found[p] for p in positions if p in found]
        missing = self.num_missing(tables, wanted)
        for pool, wanted_of_it, blocks in zip(self.pools, missing, held, strict=True):
            if wanted_of_it > pool.num_free_without(blocks):
                return None
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.share(blocks)
        self.fill(tables, wanted)
        return tables

    def fill(self, tables: Tables, wanted: Positions) -> None:
        """Allocates blocks where tables lack them; there are enough."""
        num_blocks = 1 + max(p for positions in wanted for p in positions)
        new = [iter(self._allocate(pool, n)) for pool, n in enumerate(self.num_missing(tables, wanted))]
        for group, table, positions in zip(self.groups, tables, wanted, strict=True):
            table += [NULL] * (num_blocks - len(table))
            for p in positions:
                if table[p] == NULL:
                    table[p] = next(new[group.pool])

    def _allocate(self, pool: int, num_blocks: int) -> list[int]:
        for key in self.pools[pool].next_evicted(num_blocks):
            self._on_evict(key)
        return self.pools[pool].allocate(num_blocks)

    def release_passed(self, tables: Tables, num_computed: int) -> None:
        """Frees the blocks that no token after these depends on."""
        for group, table in zip(self.groups, tables, strict=True):
            self.take_out(group, table, range(min(len(table), group.needed(num_computed).start)))

    def take_out(self, group: Group, table: list[int], positions: Sequence[int]) -> None:
        """Frees the blocks at these positions, where there are any."""
        held = [p for p in positions if table[p] != NULL]
        self.pools[group.pool].free([table[p] for p in held])
        for p in held:
            table[p] = NULL

    def release_left_over(self, tables: Tables, num_computed: int) -> None:
        """Frees the blocks that a request must not keep when only so many tokens are computed after all."""
        for group, table in zip(self.groups, tables, strict=True):
            self.take_out(group, table, group.left_over(num_computed, len(table)))

    def settle(self, tables: Tables, start: int, end: int) -> None:
        """A step that computes these tokens is certain."""
        for group, table in zip(self.groups, tables, strict=True):
            moved = group.moved(start, end)
            if moved is not None:
                source, target = moved
                assert table[target] == NULL, "two blocks where there is one"
                table[source], table[target] = NULL, table[source]

    def unsettle(self, tables: Tables, start: int, end: int) -> None:
        """Such a step was not executed after all."""
        for group, table in zip(self.groups, tables, strict=True):
            moved = group.moved(start, end)
            if moved is not None:
                source, target = moved
                table[source], table[target] = table[target], NULL
        self.release_left_over(tables, start)

    def can_continue(self, tables: Tables, num_computed: int) -> bool:
        """Whether a request has all blocks that tokens after these depend on."""
        wanted = [group.needed(num_computed) for group in self.groups]
        return not any(self.num_missing(tables, wanted))

    def free(self, tables: Tables) -> None:
        for group, table in zip(self.groups, tables, strict=bool(tables)):
            self.pools[group.pool].free([block for block in table if block != NULL])

    def register(self, tables: Tables, hashes: Sequence[BlockHash], first: int, end: int) -> None:
        """Adds the full blocks at these positions to the prefix cache."""
        for group, table in zip(self.groups, tables, strict=True):
            pool = self.pools[group.pool]
            for p in range(first, min(end, len(table))):
                if table[p] != NULL:
                    pool.register(table[p], (group.group_id, hashes[p]))

    def invalidate(self) -> None:
        """Empties the prefix cache."""
        for pool in self.pools:
            pool.invalidate()
