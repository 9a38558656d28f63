"""A dialogue with a checkpoint: its model generates with transformers, and each answer is printed as it comes."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer

from async_grpo.archive.output_dir import newest_checkpoint
from async_grpo.errors import BadFileError, UsageError
from async_grpo.formatting import counted, printable
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import read_object

ADAPTER, MODEL = "adapter_config.json", "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    temperature: float = 1.0  # 0: the most likely token each time
    max_tokens: int = 512  # of one answer
    system: str | None = None


def checkpoint_at(folder: Path) -> Path:
    """The checkpoint that `folder` means: itself, or the newest complete one of the run in it.

    Raises:
        UsageError: it is neither a checkpoint nor a run directory.
        RunDirError: the run has no checkpoint.
    """
    if RunDir(folder).state_file.exists():
        return newest_checkpoint(folder)
    if (folder / ADAPTER).is_file() or (folder / MODEL).is_file():
        return folder
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}. Give a checkpoint's folder, or the directory of a run.")
    inside = sorted(
        (path for path in folder.glob("checkpoint-*") if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    if inside:
        raise UsageError(
            f"{folder} is a folder of checkpoints. Choose one of its {counted(len(inside), 'checkpoint')}; the last "
            f"that was written is {inside[-1]}."
        )
    raise UsageError(
        f"{folder} is not a checkpoint, as it has neither {MODEL} nor {ADAPTER}, and not a run directory, as it has no "
        "run.json."
    )


def begin(folder: Path, device: str, options: ChatOptions, say: Callable[[str], None]) -> ChatDialogue:
    """A dialogue with the checkpoint that `folder` means.

    A live run deletes old checkpoints, perhaps the one that is being loaded: then its newest one is taken.
    """
    checkpoint = checkpoint_at(folder)
    while True:
        say(f"loading {checkpoint}")
        try:
            return ChatDialogue(checkpoint, device, options)
        except UsageError:
            newest = checkpoint_at(folder)
            if newest == checkpoint:
                raise
            checkpoint = newest


class ChatDialogue:
    """The model of a checkpoint, and what was said so far.

    Where the tokenizer has a chat template, each question is answered in view of the earlier ones. Where it has none,
    nothing says how a dialogue looks to the model: it continues each text on its own.

    Raises:
        UsageError: the folder cannot be loaded; or `options` has a system prompt, and the tokenizer no chat template.
    """

    def __init__(self, checkpoint: Path, device: str, options: ChatOptions) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._options = options
        self._device = "cpu" if device == "cpu" else "cuda"
        self._model, self._tokenizer = load(checkpoint, self._device)
        self.has_template = bool(self._tokenizer.chat_template)
        if options.system is not None and not self.has_template:
            raise UsageError(
                f"The tokenizer of {checkpoint} has no chat template, so there is no place for a system prompt. Leave "
                "--system out, or write it into the prompt."
            )
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        self._messages: list[dict[str, str]] = system

    def answer(self, text: str) -> None:
        """Print the model's answer. Ctrl-C ends it early: `KeyboardInterrupt`, after what was said is recorded.

        Raises:
            UsageError: the dialogue is longer than what the model can read. It is as it was before.
        """
        text = text.encode(errors="surrogateescape").decode(errors="replace")  # bytes that are no UTF-8
        asked = [*self._messages, {"role": "user", "content": text}]
        prompt = self._tokens(asked, text)
        how = self._how_to_generate(prompt.shape[1])
        spoken = _Spoken(self._tokenizer)
        try:
            self._model.generate(
                input_ids=prompt.to(self._device),
                attention_mask=prompt.new_ones(prompt.shape).to(self._device),
                generation_config=how,
                streamer=spoken,
            )
        except KeyboardInterrupt:
            spoken.end()
            raise
        finally:
            self._messages = [*asked, {"role": "assistant", "content": spoken.text}]

    def _tokens(self, messages: list[dict[str, str]], text: str) -> Any:
        """The token ids of what the model is to continue, [1, N]."""
        if not self.has_template:
            return self._tokenizer(text, return_tensors="pt")["input_ids"]
        try:
            tokens = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # the template is a program, which raises what it likes
            raise UsageError(f"The chat template of the checkpoint refuses this: {error}") from error
        return tokens["input_ids"]

    def _how_to_generate(self, prompt_length: int) -> Any:
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        left = self._options.max_tokens if context is None else min(self._options.max_tokens, context - prompt_length)
        if prompt_length == 0:
            raise UsageError("The tokenizer makes no tokens of this text.")
        if left < 1:
            raise UsageError(
                f"This is {prompt_length} tokens with what was said before, and the model reads at most {context}. "
                "Begin a new chat."
            )
        temperature = self._options.temperature
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        ends, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        return transformers.GenerationConfig(
            **sampling,
            max_new_tokens=left,
            eos_token_id=_all_of(self._model.generation_config.eos_token_id, ends),
            pad_token_id=ends if pad is None else pad,
        )


class _Spoken(TextStreamer):
    """Prints an answer as it comes, with control characters as escapes, and keeps it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        print(printable(text), end="\n" if stream_end else "", flush=True)


def _all_of(*tokens: int | list[int] | None) -> list[int] | None:
    """The tokens that end an answer: the model's, and the tokenizer's, with which it was trained."""
    found = {token for some in tokens if some is not None for token in (some if isinstance(some, list) else [some])}
    return sorted(found) or None


def load(checkpoint: Path, device: str) -> tuple[Any, Any]:
    """The model and the tokenizer of a checkpoint. `UsageError` if they cannot be loaded."""
    is_adapter = (checkpoint / ADAPTER).is_file()
    try:
        base = _base_of(checkpoint) if is_adapter else str(checkpoint)
        has_tokenizer = (checkpoint / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint) if has_tokenizer else base)
        # The class that it was saved as: a model of images and text is not a causal language model.
        names = AutoConfig.from_pretrained(base).architectures or [""]
        model: Any = getattr(transformers, names[0], AutoModelForCausalLM).from_pretrained(base, dtype="auto")
        if is_adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(checkpoint))
        return model.to(device).eval(), tokenizer
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"{checkpoint} cannot be loaded: {error}") from error


def _base_of(adapter: Path) -> str:
    try:
        base = read_object(adapter / ADAPTER).get("base_model_name_or_path")
    except BadFileError as error:
        raise UsageError(f"The adapter in {adapter} cannot be read: {error}") from error
    if not base:
        raise UsageError(
            f"{adapter} is an adapter, and does not name its base model: the setup file built it in memory. Save the "
            f"base with save_pretrained, and write its folder as base_model_name_or_path into {adapter / ADAPTER}."
        )
    return str(base)


def talk(dialogue: ChatDialogue) -> None:
    """Answer each line of standard input until it ends. Ctrl-C ends an answer; where none is given, the dialogue."""
    asks = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            text = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text.strip():
            continue
        try:
            dialogue.answer(text)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)
