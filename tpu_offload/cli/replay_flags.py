"""The flags of commands that serve a workload: what is served, the model, the sizes of the engine."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from tpu_offload.cli.flags import float_flag, int_flag
from tpu_offload.engine import ModelConfig

ENGINE_FLAGS = ("block_size", "max_num_batched_tokens", "num_spare_blocks", "async_scheduling")
MODEL_FLAGS = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")


def add_serving_flags(parser: argparse.ArgumentParser, *, defaults: Mapping[str, str]) -> None:
    """Adds them to a command.

    Args:
      parser: of the command.
      defaults: for the help, by the name of the flag. The flag's value is None where it is not given.
    """
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", choices=["chat", "decode"], help=f"generated requests ({defaults['workload']})")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines of chat messages")
    source.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in the Mooncake format")
    add = parser.add_argument
    add("--requests", type=int_flag(1), metavar="N", help=f"requests at most ({defaults['requests']})")
    add("--seed", type=int_flag(0, 2**32 - 1), default=0, metavar="N", help="of everything that is drawn (0)")
    add("--turns", type=int_flag(1), metavar="N", help=f"chat: turns of a conversation ({defaults['turns']})")
    add("--max-tokens", type=int_flag(1), metavar="N", help="--prompts: tokens to generate a request (16)")
    add("--tokens-per-block", type=int_flag(1, 512), metavar="N", help="--trace: tokens for each 512 of the trace (16)")
    add(
        "--temperature",
        type=float_flag(0),
        default=0.0,
        metavar="T",
        help="sample, with a seed a request; 0 is greedy (0)",
    )
    add("--top-k", type=int_flag(0), default=0, metavar="K", help="sample from the K most likely tokens; 0 is all (0)")
    add("--concurrency", type=int_flag(1), metavar="N", help=f"requests in flight ({defaults['concurrency']})")
    add("--num-blocks", type=int_flag(1), metavar="N", help=f"HBM blocks ({defaults['num_blocks']})")
    for name, allowed, text in (
        ("block_size", int_flag(1), "tokens in a block"),
        ("max_num_batched_tokens", int_flag(1), "tokens computed in a step"),
        ("num_spare_blocks", int_flag(0), "blocks kept free at admission for each request that runs"),
        ("async_scheduling", int_flag(0, 1), "1 dispatches a step before the tokens of the last one are read"),
    ):
        add(f"--{name.replace('_', '-')}", type=allowed, metavar="N", help=f"{text} ({defaults[name]})")
    for name, text in (
        ("num_layers", "layers"),
        ("d_model", "width"),
        ("num_heads", "query heads"),
        ("num_kv_heads", "key and value heads"),
        ("head_dim", "width of a head"),
        ("d_ff", "width of the feed-forward layer"),
    ):
        add(f"--{name.replace('_', '-')}", type=int_flag(1), metavar="N", help=f"model: {text} ({defaults[name]})")
    kv_dtype = ModelConfig().kv_dtype
    add("--kv-dtype", default=kv_dtype, metavar="NAME", help=f"model: type of the KV cache ({kv_dtype})")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
