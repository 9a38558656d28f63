import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_gsm8k_model import gsm8k_folder, make_tiny_qwen3

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.evals.eval_ledger import Judge, evaluated
from kit.scripts import ROOT, module_at


@pytest.fixture(scope="module")
def recipe():
    return module_at(ROOT / "src" / "app" / "trainer_setup_gsmk.py")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny-qwen3")


@pytest.fixture
def surroundings(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", str(tiny_model))
    monkeypatch.setenv("GSM8K_PATH", str(gsm8k_folder(tmp_path)))


REWARDS = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
RIGHT = "<end_working_out><SOLUTION>18</SOLUTION>"


def completion(text):
    return [{"role": "assistant", "content": text}]


def answered(solution):
    return completion(f"16 - 7 = 9\nand so on<end_working_out><SOLUTION>{solution}</SOLUTION>")


# --- The rewards ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "exactly", "approximately"),
    [
        (f"work{RIGHT}", 3.0, 1.5),
        ("two\nlines<end_working_out>\n <SOLUTION>18</SOLUTION>", 3.0, 1.5),
        (f"work{RIGHT} \n", 3.0, 1.5),
        (f"work{RIGHT}\n<|endoftext|>", 3.0, 1.5),
        ("<start_working_out>work<end_working_out><SOLUTION>18</SOLUTION>", 3.0, 1.5),  # the first tag is not counted
        (f"work{RIGHT} and more", 0.0, 1.5),
        (f"work{RIGHT}\nanother line", 0.0, 1.5),
        ("work<end_working_out><SOLUTION></SOLUTION>", 0.0, 1.5),
        ("work<SOLUTION>18</SOLUTION><end_working_out>", 0.0, 1.5),
        ("work<SOLUTION>18</SOLUTION>", 0.0, 0.0),
        ("work<end_working_out><SOLUTION>18", 0.0, 0.0),
        ("work<end_working_out><end_working_out><SOLUTION>18</SOLUTION>", 3.0, 0.0),
        ("work<end_working_out>18", 0.0, -1.5),
        ("", 0.0, -3.0),
    ],
)
def test_points_for_the_form(recipe, text, exactly, approximately):
    functions = (recipe.match_format_exactly, recipe.match_format_approximately)
    assert [function(completions=[completion(text)]) for function in functions] == [[exactly], [approximately]]


@pytest.mark.parametrize(
    ("gold", "points", "solutions"),
    [
        ("18", 5.0, ["18", "18.0", "18.00"]),  # a number is the same number however it is written
        ("1,000", 5.0, ["1000"]),
        ("1000", 5.0, ["1,000"]),
        ("18", 3.5, [" 18 ", "\n18"]),
        ("1000", 3.5, [" 1,000"]),
        ("18", 2.0, ["19"]),
        ("10", 2.0, ["9", "11"]),
        ("1,000", 2.0, ["1,100"]),
        ("18", 1.5, ["21"]),
        ("10", 1.5, ["8", "12"]),
        ("18", -2.5, ["36", "-18"]),
        ("18", -4.5, ["eighteen", "x = 18"]),
        ("0", 5.0, ["0", "0.0"]),  # nothing is near 0, but 0 is right
        ("0", -2.5, ["5"]),
        ("0", -4.5, ["zero"]),
        ("18", -4.5, ["nan", "inf", "1_8", ",", "."]),  # what Python takes for numbers and people do not
    ],
)
def test_check_answer(recipe, gold, points, solutions):
    found = recipe.check_answer(completions=list(map(answered, solutions)), answer=[gold] * len(solutions))
    assert dict(zip(solutions, found)) == dict.fromkeys(solutions, points)


def test_check_answer_needs_the_format(recipe):
    assert recipe.check_answer(completions=[completion("<SOLUTION>18</SOLUTION>")], answer=["18"]) == [-2.0]


@pytest.mark.parametrize(
    ("gold", "points", "texts"),
    [
        ("18", 3.5, ["<SOLUTION>18</SOLUTION>", "<SOLUTION>It is $18 a day", "<SOLUTION>18.0</SOLUTION>"]),
        ("18", 3.5, ["<SOLUTION>18.", "<SOLUTION>... 18</SOLUTION>"]),
        ("18", 3.5, ["<SOLUTION>well, 18</SOLUTION>"]),  # the comma alone is no number
        ("1000", 3.5, ["<SOLUTION>1,000</SOLUTION>"]),
        ("1,000", 3.5, ["<SOLUTION>1000</SOLUTION>"]),
        ("-5", 3.5, ["<SOLUTION>-5</SOLUTION>"]),
        ("0", 3.5, ["<SOLUTION>0</SOLUTION>"]),
        ("18", -1.5, ["<SOLUTION>19</SOLUTION>", "<SOLUTION>-18</SOLUTION>"]),
        ("18", -2.5, ["<SOLUTION>,</SOLUTION>", "<SOLUTION>.</SOLUTION>", "<SOLUTION>none</SOLUTION>", "18"]),
        ("eighteen", 0.0, ["<SOLUTION>18</SOLUTION>"]),
    ],
)
def test_check_numbers(recipe, gold, points, texts):
    found = recipe.check_numbers(completions=list(map(completion, texts)), answer=[gold] * len(texts))
    assert dict(zip(texts, found)) == dict.fromkeys(texts, points)


def test_an_evaluation_counts_right_answers_and_not_points_for_the_form(recipe):
    """The points of a wrong answer in the right form are more than 1."""
    functions = [getattr(recipe, name) for name in REWARDS]
    judge = Judge.of(functions, AdvantageRule())
    completions = [answered(solution) for solution in ("18", "19", "18")]
    columns = [function(completions=completions, answer=["18"] * 3) for function in functions]
    sampled = {"completions": completions, "completion_lengths": np.array([1, 1, 1]), "metrics": {}}
    job = SimpleNamespace(task="", row={})
    answers = judge.answers(SimpleNamespace(rewards=np.array(columns).T, job=job, **sampled))
    assert answers.rewards[1] >= 1
    assert answers.successes == [True, False, True]
    about = {"run_id": "", "step": 0, "seconds": 0.0, "replicates": 3, "sampling": {}, "first_seq": 0}
    result = evaluated({0: answers}, {}, ks=(1,), has_threshold=bool(judge.thresholds), **about)
    assert result.headline == "success_rate"


@pytest.mark.parametrize(("text", "points"), [("nonsense", -7.5), (f"work{RIGHT}", 13.0)])
def test_points_range_from_nothing_right_to_all_right(recipe, text, points):
    given = {"completions": [completion(text)], "answer": ["18"], "prompts": [[]]}
    assert sum(getattr(recipe, name)(**given)[0] for name in REWARDS) == points


# --- The data -------------------------------------------------------------------------------------


def test_rows_become_conversations_with_the_number_alone(recipe, surroundings):
    train, test = recipe.load_gsm8k("train"), recipe.load_gsm8k("test")
    assert train.column_names == test.column_names == ["prompt", "answer"]
    assert [message["role"] for message in train[0]["prompt"]] == ["system", "user"]
    assert all(recipe.as_number(answer) is not None for answer in [*train["answer"], *test["answer"]])
    questions = {row[1]["content"] for row in train["prompt"]}
    assert not questions & {row[1]["content"] for row in test["prompt"]}


def test_the_number_is_what_follows_the_last_mark(recipe):
    assert recipe.as_example("q", "#### is no answer\nbut\n#### 1,080 ")["answer"] == "1,080"


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_missing_file_is_named(recipe, tmp_path, monkeypatch, missing):
    for split in {"train", "test"} - {missing}:
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "q", "answer": "#### 1"}) + "\n")
    monkeypatch.setenv("GSM8K_PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{missing}\.jsonl.*GSM8K_PATH"):
        recipe.get_trainer()


# --- The model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "no/such/model", "~/model", "."])
def test_a_missing_model_is_one_sentence(recipe, surroundings, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", name)
    with pytest.raises(FileNotFoundError, match="no config" if name == "." else "no such directory") as caught:
        recipe.get_trainer()
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-1.7B-Base", "gpt2", "a_b/c.d-1"])
def test_hub_names_are_left_to_the_hub(recipe, name):
    recipe.check_model_path(name)


class Tokenizer:
    """What `with_working_out` reads of a tokenizer."""

    def __init__(self, chat_template, eos_token="<|endoftext|>"):
        self.chat_template, self.eos_token = chat_template, eos_token


def test_templates_that_end_turns_with_the_end_of_text_are_kept(recipe):
    chat_ml = "<|im_start|>...<|im_end|>"
    assert recipe.with_working_out(Tokenizer(chat_ml, "<|im_end|>")).startswith(chat_ml)
    assert recipe.with_working_out(Tokenizer("{{ eos_token }}")).startswith("{{ eos_token }}")
    for template in (None, chat_ml):  # a base model, without a template and with one that it would never end
        once = recipe.with_working_out(Tokenizer(template))
        assert once.startswith(recipe.PLAIN_CHAT_TEMPLATE)
        assert recipe.with_working_out(Tokenizer(once)) == once, "a saved one gets no second tag"


def test_the_prompt_ends_with_the_start_tag_and_has_no_braces(recipe, tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.chat_template is None
    tokenizer.chat_template = recipe.with_working_out(tokenizer)
    messages = recipe.as_example("How many?", "#### 1")["prompt"]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == f"{recipe.SYSTEM_PROMPT}\n\nHow many?\n\n<start_working_out>"
    assert "{" not in prompt
    dialogue = [*messages, {"role": "assistant", "content": "One."}]
    assert tokenizer.apply_chat_template(dialogue, tokenize=False).endswith("How many?\n\nOne.<|endoftext|>")


# --- The trainer ----------------------------------------------------------------------------------


def test_two_steps_in_plain_trl(recipe, surroundings, tmp_path, monkeypatch):
    from async_grpo.setup.trl_compat import repair_trl

    repair_trl()
    monkeypatch.chdir(tmp_path)  # TRL makes the output directory at once
    trainer = recipe.get_trainer()
    lora = trainer.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha) == (16, 32)
    assert lora.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (trainer.num_generations, trainer.temperature) == (4, 1.0)

    trainer.args.output_dir = str(tmp_path / "out")
    trainer.args.max_steps = 2
    trainer.train()

    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert len(logged) == 2
    for name in REWARDS:
        assert all(math.isfinite(row[f"rewards/{name}/mean"]) for row in logged)
    assert logged[-1]["completions/mean_length"] < 60  # the tiny model ends its texts by itself
    assert (tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors").is_file()


def test_generated_rows_stand_in_for_the_real_data(recipe, tmp_path, monkeypatch):
    import tiny_gsm8k_model

    monkeypatch.setattr(tiny_gsm8k_model, "REAL_GSM8K", tmp_path / "absent")
    with pytest.warns(UserWarning, match="generated a few rows"):
        monkeypatch.setenv("GSM8K_PATH", str(tiny_gsm8k_model.gsm8k_folder(tmp_path)))
    assert len(recipe.load_gsm8k("train")) == 32
    assert len(recipe.load_gsm8k("test")) == 8
