"""`async-grpo chat`: which checkpoint is meant, what the model sees, and how a dialogue ends."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from async_grpo.cli import main
from async_grpo.errors import RunDirError
from async_grpo.roles import chat
from async_grpo.roles.chat import ChatDialogue, ChatOptions, checkpoint_at
from async_grpo.rundir.paths import RunDir
from kit.archived_run import RUN, save_checkpoint, three_steps

LETTERS = "abcdefghijklmnopqrstuvwxyz<>| ."
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    words = models.WordLevel({letter: number for number, letter in enumerate([*LETTERS, "[e]"])}, unk_token=".")
    letters = Tokenizer(words)
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    letters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="[e]", pad_token="[e]")
    made.chat_template = template
    return made


def model() -> Qwen3ForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)  # another model might end its answer at once
    more = {"vocab_size": len(LETTERS) + 1, "max_position_embeddings": 64, "eos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **more))


def save(folder: Path, template: str | None = None) -> Path:
    model().save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


Said = pytest.CaptureFixture[str]


def refused(capsys: Said, folder: Path, *more: str) -> str:
    assert main(["chat", str(folder), "--device", "cpu", *more]) == 2
    return capsys.readouterr().err


class Scripted:
    """A model's `generate` that says each of `answers` in turn, letter by letter, and keeps what it was given."""

    def __init__(self, dialogue: ChatDialogue, *answers: str, stopped_after: int | None = None) -> None:
        self.seen: list[str] = []
        self._tokenizer, self._answers = dialogue._tokenizer, list(answers)
        self._stopped_after = stopped_after
        dialogue._model.generate = self.generate

    def generate(self, *, input_ids: Any, streamer: Any, **_: Any) -> None:
        self.seen.append(self._tokenizer.decode(input_ids[0]))
        streamer.put(input_ids)
        for count, token in enumerate(self._tokenizer(self._answers.pop(0), return_tensors="pt")["input_ids"][0]):
            if count == self._stopped_after:
                raise KeyboardInterrupt
            streamer.put(token[None])
        streamer.end()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


Talks = Callable[..., ChatDialogue]


@pytest.fixture
def dialogue(tmp_path: Path) -> Talks:
    def make(template: str | None = TEMPLATE, **options: Any) -> ChatDialogue:
        return ChatDialogue(save(tmp_path / "saved", template), "cpu", ChatOptions(**options))

    return make


# --- which checkpoint


def test_a_run_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    run, output_dir = three_steps(tmp_path), tmp_path / "out"
    with pytest.raises(RunDirError, match="has no checkpoint yet"):
        checkpoint_at(run.root)
    save_checkpoint(output_dir, RUN, 2)
    newest = save_checkpoint(output_dir, RUN, 3)
    save_checkpoint(output_dir, "another", 9)
    (output_dir / "checkpoint-4").mkdir()  # being written, by plain TRL
    RunDir(run.root).update_state(output_dir=str(output_dir), step=3, run_dir=str(run.root))
    assert checkpoint_at(run.root) == newest


@pytest.mark.parametrize(
    ("made", "says"), [(None, "There is no folder"), ("", "is not a checkpoint"), ("checkpoint-7", "checkpoint-7.")]
)
def test_what_is_no_checkpoint_is_refused(made: str | None, says: str, tmp_path: Path, capsys: Said) -> None:
    if made is not None:
        (tmp_path / "folder" / made).mkdir(parents=True)
    assert says in refused(capsys, tmp_path / "folder")


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path, capsys: Said) -> None:
    folder = save(tmp_path / "saved")
    (folder / "model.safetensors").unlink()
    assert "cannot be loaded" in refused(capsys, folder, "--prompt", "a")


def test_a_checkpoint_that_a_live_run_deletes_while_it_is_loaded_is_replaced_by_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, newest = tmp_path / "gone", save(tmp_path / "saved")
    gone.mkdir()
    found = iter([gone, newest])
    monkeypatch.setattr(chat, "checkpoint_at", lambda folder: next(found))
    said: list[str] = []
    chat.begin(tmp_path, "cpu", ChatOptions(), said.append)
    assert said == [f"loading {gone}", f"loading {newest}"]


# --- what is said


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_one_answer_is_all_of_standard_output(kind: str, tmp_path: Path, capsys: Said) -> None:
    folder = save(tmp_path / "base")
    if kind == "adapter":
        adapted = get_peft_model(Qwen3ForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj"]))
        folder = tmp_path / "adapter"
        adapted.save_pretrained(folder)
    asked = ["chat", str(folder), "--device", "cpu", "--prompt", "abc", "--max-tokens", "5", "--temperature", "0"]
    said = []
    for _ in range(2):
        assert main(asked) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out
    assert 1 <= len(said[0].out.rstrip("\n")) <= 5
    assert f"loading {folder}" in said[0].err


def test_an_adapter_without_a_named_base_says_what_to_do(tmp_path: Path, capsys: Said) -> None:
    get_peft_model(model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert "base_model_name_or_path" in refused(capsys, tmp_path / "adapter", "--prompt", "a")


def test_a_dialogue_is_kept(dialogue: Talks, capsys: Said) -> None:
    talks = dialogue(system="be brief")
    scripted = Scripted(talks, "yes", "no")
    talks.answer("one")
    talks.answer("two")
    assert scripted.seen[0] == "<system>be brief|<user>one|<assistant>"
    assert scripted.seen[1] == "<system>be brief|<user>one|<assistant>yes|<user>two|<assistant>"
    assert capsys.readouterr().out == "yes\nno\n"


def test_without_a_chat_template_each_text_stands_alone(dialogue: Talks, tmp_path: Path, capsys: Said) -> None:
    talks = dialogue(None)
    scripted = Scripted(talks, "x", "y")
    talks.answer("ab")
    talks.answer("cd")
    assert scripted.seen == ["ab", "cd"]
    assert "no chat template" in refused(capsys, tmp_path / "saved", "--system", "be brief")


def test_a_line_that_is_no_utf_8_is_answered(dialogue: Talks, monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    talks = dialogue(None)
    Scripted(talks, "yes", "no")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), encoding="utf-8"))
    chat.talk(talks)
    talks.answer("\udcff")  # as it comes from a command line
    assert capsys.readouterr().out.split() == ["yes", "no"]


def test_ctrl_c_ends_an_answer_which_is_remembered_and_the_end_of_input_the_dialogue(
    dialogue: Talks, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    talks = dialogue()
    scripted = Scripted(talks, "one two three", "fin", stopped_after=7)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n"))
    chat.talk(talks)
    assert scripted.seen[1] == "<user>a|<assistant>one two|<user>b|<assistant>"
    written = capsys.readouterr()
    assert written.out == "one two\nfin\n\n"
    assert "(stopped)" in written.err


def test_what_is_longer_than_the_model_reads_is_refused_and_the_dialogue_goes_on(
    dialogue: Talks, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    talks = dialogue()
    scripted = Scripted(talks, "fin")
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * 70 + "\nb\n"))
    chat.talk(talks)
    assert "the model reads at most 64" in capsys.readouterr().err
    assert scripted.seen == ["<user>b|<assistant>"]


def test_control_characters_do_not_reach_the_terminal(capsys: Said) -> None:
    chat._Spoken(tokenizer()).on_finalized_text("a\x1b[2J", stream_end=True)
    assert capsys.readouterr().out == "a\\x1b[2J\n"
