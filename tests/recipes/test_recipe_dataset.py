"""The recipe for GSM8K, MATH and MBPP, on a few rows and a tiny model."""

import json

import pytest
from tiny_gsm8k_model import make_tiny_qwen3
from transformers import AutoTokenizer

from kit.scripts import ROOT, module_at

RECIPE = ROOT / "src" / "app" / "trainer_setup_dataset.py"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
ROWS = {
    "gsm8k": {"question": "2 eggs and 3?", "answer": "2 + 3 = 5\n#### 5"},
    "math": {"problem": "Half of 1?", "solution": "It is $\\boxed{\\frac{1}{2}}$."},
    "mbpp": {"prompt": "Add.", "test_list": ["assert add(1, 2) == 3"], "code": "def add(a, b): return a + b"},
}
RIGHT = {"gsm8k": "5", "math": "0.5"}
HACKABLE = {"prompt": "Is it?", "test_list": ["assert is_it(1)"], "code": "def is_it(x): return True"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    path = make_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny-qwen3")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def surroundings(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", str(tiny_model))
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path


def write_rows(folder, *rows):
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ROWS)
def test_the_trainer_of_each_dataset(name, surroundings, monkeypatch):
    write_rows(surroundings, *[ROWS[name]] * 40)
    monkeypatch.setenv("DATASET", name)
    monkeypatch.setenv("EVAL_ROWS", "7")
    trainer = module_at(RECIPE).get_trainer()
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (40, 7)
    assert trainer.eval_dataset[0]["task"] == name
    assert trainer.reward_funcs[0].__name__ == name
    assert trainer.args.generation_batch_size == 16 * 32
    if name in RIGHT:
        text = f"so<end_working_out><SOLUTION>{RIGHT[name]}</SOLUTION>"
        columns = {"answer": [trainer.train_dataset[0]["answer"]]}
        assert trainer.reward_funcs[0]([[{"role": "assistant", "content": text}]], **columns) == [1.0]


def test_programs_whose_tests_could_be_cheated_are_left_out(surroundings, monkeypatch, capsys):
    write_rows(surroundings, ROWS["mbpp"], HACKABLE)
    monkeypatch.setenv("DATASET", "mbpp")
    recipe = module_at(RECIPE)
    assert len(recipe.load(*recipe.chosen_task(), "test")) == 1
    assert "mbpp, test: 1 of 2 rows can be used" in capsys.readouterr().out
    write_rows(surroundings, HACKABLE)
    with pytest.raises(ValueError, match="has no row of mbpp that can be used"):
        recipe.load(*recipe.chosen_task(), "test")


def test_an_unknown_dataset_is_a_sentence(surroundings, monkeypatch):
    monkeypatch.setenv("DATASET", "gsm9k")
    with pytest.raises(ValueError, match="Choose one of gsm8k, math, mbpp"):
        module_at(RECIPE).get_trainer()
