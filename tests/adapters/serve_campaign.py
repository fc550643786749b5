"""Conversations with a real `vllm serve` whose requests are preempted; `scripts/serve-campaign` runs it.

For each seed, the same conversations run on two servers: `clean`, with 400 blocks and no connector, whose answers are
right, and ours, with so few blocks that requests are preempted. Then the HBM of both is emptied, and each conversation,
with our answers, is sent to both for the next token's log probabilities: ours loads it from the host tier, `clean`
computes it. The difference is exactly 0 unless the host tier has KV of other tokens than those of its key.

All of this must hold with injected faults, too. The exception is `--faults '{"load leaves out a block": 0.05}'`: it is
detected only after tokens that depend on it were returned. Answers may differ then; KV in the host tier must not.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence

from scripts.vllm_cpu.vllm_client import Client, Load, RequestFailed, Turn, answers
from scripts.vllm_cpu.vllm_server import BLOCK_SIZE, OURS, Folder, Server, ServerError
from tpu_offload.cli.command import run_process

FAULTS = {"load raises": 0.1, "load raises and takes the KV caches": 0.02}
_CLEAN_BLOCKS = 400
_FAILED = "vllm:tpu_offload_failed_jobs_total"
_PREEMPTED = "vllm:num_preemptions_total"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one seed.

    Attributes:
      num_answers: answers that were compared.
      differing: (conversation, turn) of wrong answers.
      num_preemptions: on our server.
      num_failed_jobs: on our server; the injected ones, if any.
      loaded: tokens found in the host tier when the conversations were sent again.
      wrong: by conversation, the largest difference of log probabilities that is not 0.
    """

    num_answers: int
    differing: list[tuple[int, int]]
    num_preemptions: int
    num_failed_jobs: int
    loaded: int
    wrong: dict[int, float]

    def line(self) -> str:
        """The outcome in one line."""
        said = f"{self.num_answers} answers, {len(self.differing)} differ {self.differing or ''}".rstrip()
        kept = f"{self.loaded} tokens found again, {len(self.wrong)} conversations with wrong KV"
        if self.wrong:
            kept += " " + ", ".join(f"{number}: {off:.4f}" for number, off in self.wrong.items())
        return f"{said}; {self.num_preemptions} preemptions; {self.num_failed_jobs} failed copies; {kept}"


async def run_seed(ours: Server, clean: Server, load: Load, seed: int) -> Outcome:
    """Runs the conversations of a seed on both servers, and sends them again.

    Raises:
      RequestFailed: a request was answered with an error.
    """
    clean.reset_prefix_cache(external=False)
    ours.reset_prefix_cache(external=True)
    before = ours.metrics()
    async with Client(clean.url) as asks_clean, Client(ours.url) as asks_ours:
        right = answers(await asks_clean.converse(load, seed=seed))
        turns = await asks_ours.converse(load, seed=seed)
        found = answers(turns)
        after = ours.metrics()
        clean.reset_prefix_cache(external=False)
        ours.reset_prefix_cache(external=False)
        loaded, wrong = 0, {}
        for turn in turns:
            if turn.turn == load.turns - 1:
                cached, off = await _difference(asks_ours, asks_clean, turn)
                loaded += cached
                if off:
                    wrong[turn.conversation] = off
    return Outcome(
        num_answers=len(found),
        differing=sorted(at for at in right if found[at] != right[at]),
        num_preemptions=round(after[_PREEMPTED] - before[_PREEMPTED]),
        num_failed_jobs=round(after[_FAILED] - before[_FAILED]),
        loaded=loaded,
        wrong=wrong,
    )


async def _difference(ours: Client, clean: Client, turn: Turn) -> tuple[int, float]:
    whole = turn.prompt + turn.answer.tokens
    whole = [*whole[: len(whole) // BLOCK_SIZE * BLOCK_SIZE], 5]  # whole blocks, and one token to compute
    loaded = await ours.complete(whole, answer=1, logprobs=5)
    computed = await clean.complete(whole, answer=1, logprobs=5)
    if loaded.top_logprobs.keys() != computed.top_logprobs.keys():
        return loaded.cached_tokens, float("inf")
    return loaded.cached_tokens, max(abs(p - computed.top_logprobs[word]) for word, p in loaded.top_logprobs.items())


def run(args: argparse.Namespace) -> int:
    """Runs all seeds. Returns the exit status."""
    extra = dict(OURS["kv_connector_extra_config"]) | {"patch_runner": args.patch_runner}
    connector = {**OURS, "kv_connector_extra_config": extra}
    faults = FAULTS if args.faults == "" else json.loads(args.faults or "{}")
    environ = {"CPU_SHIM_FAULTS": json.dumps({"seed": args.seed, **faults})} if faults else {}
    load = Load(
        conversations=args.conversations, turns=args.turns, concurrency=args.concurrency, answer=args.answer
    )  # fmt: skip
    outcomes: list[Outcome] = []
    interrupted = False
    with (
        Folder() as folder,
        Server(folder, num_blocks=_CLEAN_BLOCKS) as clean,
        Server(
            folder, num_blocks=args.hbm_blocks, connector=connector, environ=environ, arguments=args.serve_arguments
        ) as ours,
    ):
        try:
            clean.wait_until_ready()
            ours.wait_until_ready()
            for seed in range(args.seed, args.seed + args.seeds):
                outcomes.append(asyncio.run(run_seed(ours, clean, load, seed)))
                print(f"seed {seed}: {outcomes[-1].line()}", flush=True)
        except (ServerError, RequestFailed, ExceptionGroup, OSError) as e:
            print(f"seed {args.seed + len(outcomes)}: {e!r}\n{ours.log_tail()}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            interrupted = True
    return _sum_up(args, outcomes, interrupted=interrupted, faults=bool(faults))


def _sum_up(args: argparse.Namespace, outcomes: Sequence[Outcome], *, interrupted: bool, faults: bool) -> int:
    differing = sum(len(one.differing) for one in outcomes)
    wrong = sum(len(one.wrong) for one in outcomes)
    preemptions = sum(one.num_preemptions for one in outcomes)
    failed = sum(one.num_failed_jobs for one in outcomes)
    print(
        f"{len(outcomes)} seeds: {sum(one.num_answers for one in outcomes)} answers, {differing} differ; {preemptions} "
        f"preemptions; {failed} failed copies; {sum(one.loaded for one in outcomes)} tokens found again, {wrong} "
        f"conversations with wrong KV in the host tier"
    )
    if interrupted:
        return 130
    # Without the patch, the saves of requests with lost tokens are cancelled, which counts as failed copies.
    unexpected = faults != bool(failed) and (faults or args.patch_runner)
    if unexpected:
        print("no injected fault occurred" if faults else "copies failed")
    if preemptions < args.min_preemptions:
        print(f"fewer than {args.min_preemptions} preemptions")
    bad = wrong or (differing and args.patch_runner) or preemptions < args.min_preemptions or unexpected
    return int(bool(bad))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="serve-campaign", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, default=20, help="how many")
    add("--seed", type=int, default=1, help="the first")
    add("--hbm-blocks", type=int, default=80, help="one of them is never used")
    add("--conversations", type=int, default=8)
    add("--turns", type=int, default=3)
    add("--concurrency", type=int, default=8, help="requests at a time")
    add("--answer", type=int, default=60, help="tokens of an answer")
    add("--min-preemptions", type=int, default=1, help="of all seeds together; fewer are a failure")
    add(
        "--faults",
        nargs="?",
        const="",
        help=f"JSON of faults and their probability a copy; alone: {json.dumps(FAULTS)}",
    )
    add(
        "--no-patch-runner",
        dest="patch_runner",
        action="store_false",
        help="do not restore tokens that tpu-inference loses; answers may differ",
    )
    add("serve_arguments", nargs="*", help="arguments of `vllm serve` for ours, after --")
    args = parser.parse_args()
    if min(args.seeds, args.conversations, args.turns, args.concurrency, args.answer) < 1:
        parser.error("counts begin at 1")
    return run(args)


if __name__ == "__main__":
    run_process(main)
