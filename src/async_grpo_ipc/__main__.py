"""`python -m async_grpo_ipc inspect HANDLE` and `... check HANDLE`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m async_grpo_ipc",
        description="Look at weights that another process of this machine publishes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python -m async_grpo_ipc inspect worker/ps_ipc_handle.json\n"
        "  python -m async_grpo_ipc check worker/ps_ipc_handle.json --device cuda:1",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    handle_help = "the handle file; by default CUDA_IPC_HANDLE_PATH, or worker/ps_ipc_handle.json"
    inspect = commands.add_parser(
        "inspect", help="what is published: buckets, slots, sizes, versions, and the processes that hold leases"
    )
    inspect.add_argument("handle", nargs="?", type=Path, help=handle_help)
    inspect.add_argument("--tensors", action="store_true", help="also list every tensor")
    check = commands.add_parser("check", help="attach, verify a canary, measure bandwidth; say what is wrong, if it is")
    check.add_argument("handle", nargs="?", type=Path, help=handle_help)
    check.add_argument("--device", help="the device that will read, where the weights are on a GPU (cuda:1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from async_grpo_ipc.errors import IPCError
    from async_grpo_ipc.report import check, inspect

    try:
        if args.command == "inspect":
            print(inspect(args.handle, tensors=args.tensors))
            return 0
        report, sound = check(args.handle, args.device)
        print(report)
        return 0 if sound else 1
    except IPCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
