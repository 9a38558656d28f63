"""`async-grpo chat`: ask a checkpoint something, and read the answer as it is generated."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from async_grpo.cli import options
from async_grpo.settings import not_negative_number, positive
from async_grpo.setup.devices import check_torch_sees, choose_device, hold_to_device

EXAMPLES = """\
  async-grpo chat worker                                   the newest checkpoint of the run in worker/
  async-grpo chat outputs/run/checkpoint-100               this checkpoint, a whole model or an adapter
  async-grpo chat worker --prompt "12+34=" --temperature 0 one answer, and nothing else on standard output"""


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "chat",
        "Talk to a checkpoint. Ctrl-C ends an answer, Ctrl-D the dialogue. Needs no setup file, and changes no file.",
        EXAMPLES,
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        default=options.DEFAULT_RUN_DIR,
        metavar="CHECKPOINT|RUN_DIR",
        help="a checkpoint's folder, or a run, which means its newest complete one (default: worker/)",
    )
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="answer this and end")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt; needs a chat template")
    parser.add_argument(
        "--temperature", type=not_negative_number, default=1.0, metavar="T", help="default: 1; 0: the likeliest token"
    )
    parser.add_argument("--max-tokens", type=positive, default=512, metavar="N", help="of an answer (default: 512)")
    options.add_device_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    hold_to_device(device, os.environ)
    check_torch_sees(device)

    from async_grpo.roles.chat import ChatOptions, begin, talk

    chat_options = ChatOptions(temperature=args.temperature, max_tokens=args.max_tokens, system=args.system)
    dialogue = begin(args.checkpoint, device, chat_options, partial(print, file=sys.stderr))
    if not dialogue.has_template:
        print("its tokenizer has no chat template: the model continues each text on its own", file=sys.stderr)
    if args.prompt is not None:
        dialogue.answer(args.prompt)
        return 0
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits its line, and knows the earlier ones
    talk(dialogue)
    return 0
