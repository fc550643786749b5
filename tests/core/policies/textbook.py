"""Policies of the literature as their papers have them: single blocks, one at a time, and no rule about prefixes."""

from collections import OrderedDict


class LRU:
    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: OrderedDict[object, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self.blocks

    def use(self, key: object) -> None:
        if key not in self.blocks and len(self.blocks) >= self.size:
            self.blocks.popitem(last=False)
        self.blocks[key] = None
        self.blocks.move_to_end(key)


Blocks = OrderedDict[object, None]


class ARC:
    """Figure 4 of Megiddo and Modha, FAST 2003."""

    def __init__(self, size: int) -> None:
        self.c, self.p = size, 0.0
        self.t1, self.t2, self.b1, self.b2 = Blocks(), Blocks(), Blocks(), Blocks()

    def __contains__(self, key: object) -> bool:
        return key in self.t1 or key in self.t2

    def use(self, key: object) -> None:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if key in self:
            t1.pop(key, None)
            t2.pop(key, None)
        elif key in b1:
            self.p = min(self.c, self.p + max(1, len(b2) / len(b1)))
            self.replace(key)
            del b1[key]
        elif key in b2:
            self.p = max(0, self.p - max(1, len(b1) / len(b2)))
            self.replace(key)
            del b2[key]
        else:
            self.miss(key)
            t1[key] = None
            return
        t2[key] = None

    def miss(self, key: object) -> None:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.popitem(last=False)
                self.replace(key)
            else:
                t1.popitem(last=False)
        elif (total := len(t1) + len(t2) + len(b1) + len(b2)) >= c:
            if total == 2 * c:
                b2.popitem(last=False)
            self.replace(key)

    def replace(self, key: object) -> None:
        t1, t2 = self.t1, self.t2
        if t1 and (len(t1) > self.p or (key in self.b2 and len(t1) == self.p)):
            self.b1[t1.popitem(last=False)[0]] = None
        else:
            self.b2[t2.popitem(last=False)[0]] = None


class S3FIFO:
    """Algorithm 1 of Yang et al., SOSP 2023; `used_again` uses after the first lead to the main queue."""

    def __init__(self, size: int, used_again: int = 1) -> None:
        self.size, self.used_again = size, used_again
        self.small, self.main, self.ghosts = Blocks(), Blocks(), Blocks()
        self.counts: dict[object, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.counts

    def use(self, key: object) -> None:
        if key in self.counts:
            self.counts[key] = min(self.counts[key] + 1, 3)
            return
        while len(self.counts) >= self.size:
            if len(self.small) >= max(1, int(0.1 * self.size)) or not self.main:
                self.evict_small()
            else:
                self.evict_main()
        if key in self.ghosts:
            del self.ghosts[key]
            self.main[key] = None
        else:
            self.small[key] = None
        self.counts[key] = 0

    def evict_small(self) -> None:
        while self.small:
            key, _ = self.small.popitem(last=False)
            if self.counts[key] < self.used_again:
                del self.counts[key]
                self.ghosts[key] = None
                if len(self.ghosts) > self.size:
                    self.ghosts.popitem(last=False)
                return
            self.counts[key] = 0
            self.main[key] = None

    def evict_main(self) -> None:
        while self.main:
            key, _ = self.main.popitem(last=False)
            if not self.counts[key]:
                del self.counts[key]
                return
            self.counts[key] -= 1
            self.main[key] = None


class WTinyLFU:
    """Einziger, Friedman and Manes, ACM ToS 13 (2017), with exact counts in place of the sketch."""

    def __init__(self, size: int) -> None:
        self.window_size = max(1, size // 100)
        self.main_size = size - self.window_size
        self.sample = 10 * size
        self.window, self.probation, self.protected = Blocks(), Blocks(), Blocks()
        self.counts: dict[object, int] = {}
        self.num_counted = 0

    def __contains__(self, key: object) -> bool:
        return key in self.window or key in self.probation or key in self.protected

    def use(self, key: object) -> None:
        self.count(key)
        if key in self.window:
            self.window.move_to_end(key)
        elif key in self.protected:
            self.protected.move_to_end(key)
        elif key in self.probation:
            del self.probation[key]
            self.protected[key] = None
            if len(self.protected) > int(0.8 * self.main_size):
                self.probation[self.protected.popitem(last=False)[0]] = None
        else:
            self.window[key] = None
            if len(self.window) > self.window_size:
                self.admit(self.window.popitem(last=False)[0])

    def admit(self, candidate: object) -> None:
        if not self.main_size:
            return
        if len(self.probation) + len(self.protected) >= self.main_size:
            main = self.probation or self.protected
            victim = next(iter(main))
            if self.counts.get(candidate, 0) <= self.counts.get(victim, 0):
                return
            del main[victim]
        self.probation[candidate] = None

    def count(self, key: object) -> None:
        self.counts[key] = min(self.counts.get(key, 0) + 1, 15)
        self.num_counted += 1
        if self.num_counted >= self.sample:
            self.counts = {key: num // 2 for key, num in self.counts.items() if num > 1}
            self.num_counted //= 2


TEXTBOOK = {"lru": LRU, "arc": ARC, "s3fifo": S3FIFO, "wtinylfu": WTinyLFU}


def prefix_hit_rate(policy, prompts) -> float:
    """Blocks found before the first miss, as a share; each request then uses all its blocks, tail first."""
    num_hits = 0
    for prompt in prompts:
        num_hits += next((i for i, key in enumerate(prompt) if key not in policy), len(prompt))
        for key in reversed(prompt):
            policy.use(key)
    return num_hits / sum(map(len, prompts))
