"""Writes a synthetic request trace of one kind, for `tpu-offload simulate --trace`.

  python benchmarks/traffic.py agent > agent.jsonl
  tpu-offload simulate --trace agent.jsonl

The kinds differ in what is reused and when, which exposes a policy that suits only one of them. By what those of
`HELD_OUT` show no policy was changed. The format is that of the Mooncake traces: blocks of 512 tokens, the last block
of each prompt partly filled.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

type Blocks = list[int]
type Event = Callable[[float], Blocks]


class Clock:
    """An event queue; each event may schedule others."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._blocks = itertools.count()
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Event]] = []

    def blocks(self, num: float) -> Blocks:
        """New blocks."""
        return list(itertools.islice(self._blocks, max(0, int(num))))

    def at(self, time_s: float, event: Event) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def arrivals(self, rate: float, end_s: float, event: Callable[[], Event]) -> None:
        """Schedules Poisson arrivals."""
        time_s = self.random.expovariate(rate)
        while time_s < end_s:
            self.at(time_s, event())
            time_s += self.random.expovariate(rate)

    def play(self, end_s: float) -> list[tuple[float, Blocks]]:
        served = []
        while self._events and self._events[0][0] <= end_s:
            time_s, _, event = heapq.heappop(self._events)
            served.append((time_s, event(time_s)))
        return served


def chat(clock: Clock) -> float:
    """Conversations of a few turns, minutes apart; nothing is shared."""
    rng = clock.random

    def turn(time_s: float, prompt: Blocks) -> Blocks:
        prompt = prompt + clock.blocks(rng.lognormvariate(1.5, 1))
        if rng.random() < 0.7:
            clock.at(time_s + rng.lognormvariate(4.2, 1.2), lambda t: turn(t, prompt + clock.blocks(1)))
        return prompt + clock.blocks(1)

    clock.arrivals(1, 2400, lambda: lambda t: turn(t, []))
    return 2400


def edits(clock: Clock) -> float:
    """Chats whose users often edit an earlier turn, under a load that varies periodically."""
    rng, system = clock.random, clock.blocks(1)

    def turn(time_s: float, prompt: Blocks) -> Blocks:
        if len(prompt) > 3 and rng.random() < 0.25:
            prompt = prompt[: rng.randint(1, len(prompt))]
        prompt = prompt + clock.blocks(rng.lognormvariate(1.2, 1))
        if rng.random() < 0.75:
            clock.at(time_s + rng.lognormvariate(3.5, 1), lambda t: turn(t, prompt + clock.blocks(1)))
        return prompt + clock.blocks(1)

    time_s = 0.0
    while time_s < 2000:
        time_s += rng.expovariate(1 + 0.8 * math.sin(time_s / 200))
        clock.at(time_s, lambda t: turn(t, system))
    return 2000


def _sessions(
    clock: Clock,
    *,
    rate: float,
    end_s: float,
    num_apps: int,
    power: float,
    app_size: tuple[int, int],
    step_size: int,
    goes_on: float,
    pause: tuple[float, float],
) -> float:
    """Sessions of apps with a system prompt per app; some apps are more popular than others."""
    rng = clock.random
    apps = [clock.blocks(rng.randint(*app_size)) for _ in range(num_apps)]
    weights = [(i + 1) ** -power for i in range(num_apps)]

    def step(time_s: float, prompt: Blocks) -> Blocks:
        prompt = prompt + clock.blocks(rng.randint(1, step_size))
        if rng.random() < goes_on:
            clock.at(time_s + rng.lognormvariate(*pause), lambda t: step(t, prompt))
        return prompt + clock.blocks(1)

    def start() -> Event:
        app = rng.choices(apps, weights)[0]
        return lambda t: step(t, app)

    clock.arrivals(rate, end_s, start)
    return end_s


def agent(clock: Clock) -> float:
    """Agents of 40 kinds with long system prompts; a step every ten seconds."""
    return _sessions(
        clock, rate=3, end_s=533, num_apps=40, power=1.0, app_size=(6, 25), step_size=6, goes_on=0.8, pause=(2.3, 0.8)
    )


def tools(clock: Clock) -> float:
    """Calls of 200 tools, each with its system prompt, and private tails, few of which continue."""
    sizes = (4, 16)
    return _sessions(
        clock, rate=6, end_s=2000, num_apps=200, power=1.1, app_size=sizes, step_size=10, goes_on=0.25, pause=(2.5, 0.8)
    )


def code(clock: Clock) -> float:
    """Coding agents: long sessions with one system prompt, steps seconds apart, occasional pauses."""
    rng, system = clock.random, clock.blocks(20)

    def step(time_s: float, prompt: Blocks, num_left: int) -> Blocks:
        prompt = prompt + clock.blocks(rng.randint(1, 8))
        if num_left:
            pause_s = rng.expovariate(1 / 8) if rng.random() < 0.85 else rng.expovariate(1 / 300)
            clock.at(time_s + pause_s, lambda t: step(t, prompt, num_left - 1))
        return prompt + clock.blocks(1)

    clock.arrivals(0.12, 3000, lambda: lambda t: step(t, system, int(rng.expovariate(1 / 25))))
    return 3000


def documents(clock: Clock) -> float:
    """Questions about long documents at random times, mixed with tool calls and short one-off prompts."""
    rng = clock.random
    apps = [clock.blocks(5) for _ in range(80)]
    weights = [1 / (i + 1) for i in range(80)]

    def ask(prompt: Blocks, most: int) -> Event:
        return lambda _: prompt + clock.blocks(rng.randint(1, most))

    for _ in range(1000):
        kind = rng.random()
        if kind < 0.25:
            document = clock.blocks(min(200, rng.lognormvariate(3.4, 0.7)))
            for _ in range(1 + int(rng.expovariate(1 / 6))):
                clock.at(rng.uniform(0, 1000), ask(document, 4))
        elif kind < 0.5:
            for _ in range(9):
                clock.at(rng.uniform(0, 1000), ask(rng.choices(apps, weights)[0], 2))
        else:
            for _ in range(3):
                clock.at(rng.uniform(0, 1000), ask([], 1))
    return 1000


def bursts(clock: Clock) -> float:
    """Documents with a few questions within a minute, and none after that."""
    rng = clock.random

    def burst() -> Event:
        document = clock.blocks(rng.randint(5, 60))
        num_left = int(rng.expovariate(1 / 4))

        def ask(time_s: float) -> Blocks:
            nonlocal num_left
            if num_left:
                num_left -= 1
                clock.at(time_s + rng.expovariate(1 / 15), ask)
            return document + clock.blocks(rng.randint(1, 3))

        return ask

    clock.arrivals(0.8, 2000, burst)
    return 2000


def _ask(clock: Clock, document: Blocks, num_new: int) -> Event:
    return lambda _: document + clock.blocks(num_new)


def popular(clock: Clock) -> float:
    """Questions about random documents, some much more popular than others; popularity never changes."""
    rng = clock.random
    documents = [clock.blocks(rng.randint(5, 40)) for _ in range(3000)]
    for time_s, document in enumerate(rng.choices(documents, [(i + 1) ** -0.8 for i in range(3000)], k=8000)):
        clock.at(time_s, _ask(clock, document, 2))
    return 8000


def loop(clock: Clock) -> float:
    """An evaluation: the same 300 documents in the same order, twelve times."""
    documents = [clock.blocks(clock.random.randint(10, 60)) for _ in range(300)]
    for time_s, document in enumerate(documents * 12):
        clock.at(time_s, _ask(clock, document, 1))
    return 3600


def drift(clock: Clock) -> float:
    """Questions about random documents whose popularity moves on: every minute another one becomes the most popular."""
    rng = clock.random
    documents = [clock.blocks(rng.randint(5, 40)) for _ in range(2000)]
    weights = [(i + 1) ** -1.0 for i in range(500)]
    for time_s, rank in enumerate(rng.choices(range(500), weights, k=9000)):
        clock.at(time_s, _ask(clock, documents[(rank + time_s // 60) % 2000], 2))
    return 9000


def crawl(clock: Clock) -> float:
    """A crawler sends long documents once each, between the questions of users about some popular ones."""
    rng = clock.random
    documents = [clock.blocks(rng.randint(5, 40)) for _ in range(400)]
    weights = [1 / (i + 1) for i in range(400)]
    for time_s in range(4000):
        clock.at(time_s, _ask(clock, rng.choices(documents, weights)[0], 2))
        if time_s // 500 % 2:  # in every other interval, as a job that is started now and then
            clock.at(time_s + 0.5, _ask(clock, clock.blocks(rng.randint(20, 60)), 0))
    return 4000


def retrieval(clock: Clock) -> float:
    """Questions with a system prompt and a few retrieved passages, best first: their order decides what is shared."""
    rng, system = clock.random, clock.blocks(3)
    passages = [clock.blocks(rng.randint(1, 3)) for _ in range(3000)]
    topics = [rng.choices(range(3000), k=12) for _ in range(400)]
    weights = [(i + 1) ** -0.9 for i in range(400)]

    def ask() -> Event:
        topic = rng.choices(topics, weights)[0]
        found = sorted(range(12), key=lambda i: i + rng.gauss(0, 1.5))[: rng.randint(3, 8)]
        context = [block for i in found for block in passages[topic[i]]]
        return lambda _: system + context + clock.blocks(1)

    clock.arrivals(4, 2500, ask)
    return 2500


def search(clock: Clock) -> float:
    """Tree search: each problem is a tree of steps, and the next step continues a promising one of the last ones."""
    rng = clock.random

    def start() -> Event:
        root = clock.blocks(rng.randint(4, 30))
        frontier = [root]
        num_left = int(rng.expovariate(1 / 30))

        def expand(time_s: float) -> Blocks:
            nonlocal num_left
            node = frontier[-1 - min(len(frontier) - 1, int(rng.expovariate(1 / 3)))]
            frontier.extend(node + clock.blocks(rng.randint(1, 3)) for _ in range(2))
            if num_left:
                num_left -= 1
                clock.at(time_s + rng.expovariate(1 / 5), expand)
            return node + clock.blocks(1)

        return expand

    clock.arrivals(0.3, 1500, start)
    return 1500


def shots(clock: Clock) -> float:
    """Benchmarks with few-shot prompts: the questions of a task follow each other, and eight tasks run at a time."""
    rng = clock.random
    for lane in range(8):
        time_s = float(lane)
        while time_s < 3000:
            shown = clock.blocks(rng.randint(3, 40))
            for _ in range(rng.randint(10, 120)):
                clock.at(time_s, _ask(clock, shown, rng.randint(1, 3)))
                time_s += rng.expovariate(1 / 4)
    return 3000


def pauses(clock: Clock) -> float:
    """Conversations whose users go away for half an hour and return, beside short ones that end soon."""
    rng, system = clock.random, clock.blocks(2)

    def turn(time_s: float, prompt: Blocks, *, stays: bool) -> Blocks:
        prompt = prompt + clock.blocks(rng.lognormvariate(1.2, 0.8))
        if rng.random() < (0.85 if stays else 0.4):
            away_s = rng.gauss(1800, 300) if stays and rng.random() < 0.4 else rng.lognormvariate(3.5, 0.8)
            clock.at(time_s + max(5, away_s), lambda t: turn(t, prompt + clock.blocks(1), stays=stays))
        return prompt + clock.blocks(1)

    def start() -> Event:
        stays = rng.random() < 0.3
        return lambda t: turn(t, system, stays=stays)

    clock.arrivals(0.8, 5400, start)
    return 5400


def evaluation(clock: Clock) -> float:
    """Evaluations: the questions of each share a few-shot head, and each is asked four times, in random order."""
    rng = clock.random
    for _ in range(24):
        head = clock.blocks(rng.randint(8, 60))
        start_s, duration_s = rng.uniform(0, 3000), rng.uniform(300, 1500)
        for _ in range(60):
            question = head + clock.blocks(rng.randint(1, 4))
            for _ in range(4):
                clock.at(start_s + rng.uniform(0, duration_s), _ask(clock, question, 1))
    return 4500


def backtracking(clock: Clock) -> float:
    """Agents that search: they go deeper, go back and try another way, or split; a judge reads the end of each way."""
    rng = clock.random
    tasks = [clock.blocks(rng.randint(5, 20)) for _ in range(20)]

    def start() -> Event:  # a way is the prompts so far, each of which begins the next
        way = [rng.choice(tasks) + clock.blocks(rng.randint(2, 10))]
        num_left = int(rng.lognormvariate(3, 0.7))

        def step(way: list[Blocks]) -> Event:
            def take(time_s: float) -> Blocks:
                nonlocal num_left
                num_left -= 1
                kept = way
                if rng.random() < 0.25:
                    kept = way[: max(1, len(way) - 1 - int(rng.expovariate(1 / 2)))]
                deeper = [*kept, kept[-1] + clock.blocks(rng.randint(1, 4))]
                if num_left > 0:
                    for _ in range(2 if rng.random() < 0.15 else 1):
                        pause_s = rng.expovariate(1 / 6) if rng.random() < 0.9 else rng.expovariate(1 / 60)
                        clock.at(time_s + pause_s, step(deeper))
                else:
                    clock.at(time_s + rng.expovariate(1 / 120), _ask(clock, deeper[-1], 2))
                return deeper[-1] + clock.blocks(1)

            return take

        return step(way)

    clock.arrivals(0.2, 1500, start)
    return 1500


def readers(clock: Clock) -> float:
    """Agents whose prompts grow at short intervals; what each has done is then read three times, minutes apart."""
    rng = clock.random

    def work(time_s: float) -> Blocks:
        first = prompt = clock.blocks(5)
        for _ in range(rng.randint(4, 29)):
            time_s += rng.expovariate(1 / 6)
            prompt = prompt + clock.blocks(2)
            clock.at(time_s, _ask(clock, prompt, 1))
        for _ in range(3):
            time_s += rng.uniform(100, 300)
            clock.at(time_s, _ask(clock, prompt, 1))
        return first + clock.blocks(1)

    clock.arrivals(0.12, 2400, lambda: work)
    return 2400


KINDS = {
    kind.__name__: kind
    for kind in (
        *(chat, edits, agent, tools, code, documents, bursts, popular, loop),
        *(drift, crawl, retrieval, search, shots, pauses, evaluation, backtracking, readers),
    )
}


CHANGING = "changing"


def tenants(clock: Clock) -> float:
    """Tenants with documents of their own: a question has a few in random order, and another may follow."""
    rng = clock.random
    systems = [clock.blocks(rng.randint(2, 10)) for _ in range(30)]
    documents = [[clock.blocks(rng.randint(3, 25)) for _ in range(60)] for _ in systems]
    weights = [1 / (i + 1) for i in range(60)]

    def ask(time_s: float, prompt: Blocks) -> Blocks:
        prompt = prompt + clock.blocks(rng.randint(1, 2))
        if rng.random() < 0.4:
            clock.at(time_s + rng.lognormvariate(3.7, 0.9), lambda t: ask(t, prompt + clock.blocks(1)))
        return prompt + clock.blocks(1)

    def start() -> Event:
        tenant = rng.choices(range(30), weights[:30])[0]
        found = dict.fromkeys(rng.choices(range(60), weights, k=rng.randint(2, 5)))
        prompt = systems[tenant] + [block for i in found for block in documents[tenant][i]]
        return lambda t: ask(t, prompt)

    clock.arrivals(2, 1800, start)
    return 1800


def templates(clock: Clock) -> float:
    """Calls of programs: a template and a text. New versions of a template replace it; some calls are made again."""
    rng = clock.random
    versions = [clock.blocks(rng.randint(1, 12)) for _ in range(120)]
    weights = [1 / (i + 1) ** 0.8 for i in range(120)]

    def call(time_s: float, prompt: Blocks, num_tries: int) -> Blocks:
        if num_tries and rng.random() < 0.15:
            clock.at(time_s + rng.expovariate(1 / 10), lambda t: call(t, prompt, num_tries - 1))
        return prompt + clock.blocks(1)

    def start() -> Event:
        number = rng.choices(range(120), weights)[0]
        text = clock.blocks(rng.lognormvariate(0.9, 0.8))
        return lambda t: call(t, versions[number] + text, 2)

    def deploy(time_s: float) -> Blocks:
        number = rng.randrange(120)
        kept = versions[number][: rng.randint(0, len(versions[number]) - 1)]
        versions[number] = kept + clock.blocks(rng.randint(1, 8))
        return call(time_s, versions[number], 0)

    clock.arrivals(3, 1800, start)
    clock.arrivals(0.05, 1800, lambda: deploy)
    return 1800


def subagents(clock: Clock) -> float:
    """Agents hand tasks to others, which begin with their tools or with all they know, and go on with the answers."""
    rng, tools = clock.random, clock.blocks(12)

    def lead(time_s: float, prompt: Blocks, num_rounds: int) -> Blocks:
        prompt = prompt + clock.blocks(rng.randint(1, 4))
        if not num_rounds:
            return prompt
        ends = [work(time_s, prompt) for _ in range(rng.randint(1, 5))]
        clock.at(max(ends) + rng.expovariate(1 / 5), lambda t: lead(t, prompt, num_rounds - 1))
        return prompt + clock.blocks(1)

    def work(time_s: float, prompt: Blocks) -> float:
        task = (prompt if rng.random() < 0.5 else tools) + clock.blocks(rng.randint(1, 6))
        for _ in range(rng.randint(1, 8)):
            time_s += 2 + rng.lognormvariate(1.8, 1.1)
            clock.at(time_s, _ask(clock, task, 1))
            task = task + clock.blocks(rng.randint(1, 5))
        return time_s

    clock.arrivals(0.15, 1800, lambda: lambda t: lead(t, tools + clock.blocks(2), rng.randint(0, 6)))
    return 1800


# Kinds by which no policy was changed: they judge it.
HELD_OUT = {kind.__name__: kind for kind in (tenants, templates, subagents)}


def make(kind: str, *, seed: int = 0) -> list[tuple[float, Blocks]]:
    """The requests of a kind: time in seconds, and blocks. `changing` is chat, then documents, then the loop."""
    if kind != CHANGING:
        clock = Clock(seed)
        return clock.play((KINDS | HELD_OUT)[kind](clock))
    served: list[tuple[float, Blocks]] = []
    for part in ("chat", "documents", "loop"):
        start_s = served[-1][0] if served else 0.0
        first = max((block for _, prompt in served for block in prompt), default=-1) + 1
        served += [(start_s + t, [first + block for block in prompt]) for t, prompt in make(part, seed=seed)[:3000]]
    return served


def lines(kind: str, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The same as lines of a trace."""
    for time_s, prompt in make(kind, seed=seed):
        line = {"timestamp": int(1000 * time_s), "input_length": 512 * len(prompt), "output_length": 1}
        yield line | {"hash_ids": prompt}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, CHANGING, *HELD_OUT])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for line in lines(args.kind, seed=args.seed):
        sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
