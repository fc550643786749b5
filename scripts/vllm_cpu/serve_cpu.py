"""Serves a tiny random model on the CPU until Ctrl-C, to try requests by hand; `scripts/serve-cpu` runs it."""

import argparse
import sys
import time

from scripts.vllm_cpu.vllm_server import MODEL, OURS, Folder, Server, ServerError
from tpu_offload.cli.command import run_process


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="serve-cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--hbm-blocks", type=int, default=80, help="KV blocks of 16 tokens; one of them is never used")
    parser.add_argument("--no-connector", action="store_true", help="without offloading")
    parser.add_argument("serve_arguments", nargs="*", help="arguments of `vllm serve`, after --")
    args = parser.parse_args()
    connector = None if args.no_connector else OURS
    with (
        Folder() as folder,
        Server(folder, num_blocks=args.hbm_blocks, connector=connector, arguments=args.serve_arguments) as server,
    ):
        print(f"starting {server.url}, log {server.log_path}", flush=True)
        try:
            server.wait_until_ready()
            print(f"ready: curl {server.url}/v1/completions -H 'Content-Type: application/json' \\")
            print(f"""  -d '{{"model": "{MODEL}", "prompt": "w17 w18 w19", "max_tokens": 8}}'""", flush=True)
            while server.processes():
                time.sleep(0.5)
            print(f"the server ended:\n{server.log_tail()}", file=sys.stderr)
        except ServerError as e:
            print(e, file=sys.stderr)
        except KeyboardInterrupt:
            return 130
    return 1


if __name__ == "__main__":
    run_process(main)
