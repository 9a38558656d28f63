import json

import pytest
import torch
from tiny_gsm8k_model import make_tiny_qwen3
from transformers import AutoTokenizer

from kit.scripts import ROOT, module_at


@pytest.fixture(scope="module")
def recipe():
    return module_at(ROOT / "src" / "app" / "trainer_setup_tiny.py")


@pytest.fixture
def short_warm_start(recipe, tmp_path, monkeypatch):
    """A cache of its own, and few steps: the cached folder's name follows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(recipe.WARM_START, "clean_steps", 3)
    monkeypatch.setitem(recipe.WARM_START, "noisy_steps", 2)


# --- The task -------------------------------------------------------------------------------------


def test_held_out_problems_are_never_trained_on(recipe):
    training, held_out = recipe.split_problems()
    assert (len(set(held_out)), len(set(training))) == (300, 50 * 50 - 300)
    assert not {frozenset(problem) for problem in training} & {frozenset(problem) for problem in held_out}
    assert recipe.split_problems() == (training, held_out), "always the same split"


def test_the_warm_start_sees_training_problems_only(recipe):
    tokenizer = recipe.build_tokenizer()
    prompts, answers = recipe.teacher_tokens(tokenizer)
    unseen = {f"{a:02}+{b:02}=" for a, b in recipe.split_problems()[1]}
    seen = set(tokenizer.batch_decode(prompts))
    assert len(seen) == 2200
    assert not seen & unseen
    assert (prompts.shape, answers.shape) == ((2200, 6), (2200, 4))


def test_rows_are_in_fixed_width(recipe):
    assert recipe.as_dataset([(7, 41), (49, 49)])[:] == {"prompt": ["07+41=", "49+49="], "answer": ["048", "098"]}


def test_only_the_exact_digits_are_rewarded(recipe):
    wrong = ["48", "0480", "048=", " 048", ""]
    given = {"completions": ["048", *wrong], "answer": ["048"] * 6, "prompts": ["07+41="] * 6}
    assert recipe.accuracy(**given) == [1.0] + [0.0] * 5


def test_tokenizer_gives_text_back(recipe):
    tokenizer = recipe.build_tokenizer()
    ids = tokenizer("07+41=048<eos>")["input_ids"]
    assert (len(ids), ids[-1]) == (10, tokenizer.eos_token_id)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "07+41=048"


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_the_teacher_errs_as_often_as_told_and_only_in_the_tens(recipe, share):
    _, answers = recipe.teacher_tokens(recipe.build_tokenizer())
    taught = recipe.with_errors(answers, share, torch.Generator().manual_seed(0))
    wrong = taught != answers
    assert wrong[:, [0, 2, 3]].sum() == 0
    assert wrong[:, 1].float().mean().item() == pytest.approx(share, abs=0.04)
    assert taught.max() <= answers.max()


# --- The cache ------------------------------------------------------------------------------------


def test_a_second_process_reads_what_the_first_has_trained(recipe, short_warm_start, capsys):
    tokenizer = recipe.build_tokenizer()
    trained = recipe.build_model(tokenizer).state_dict()
    assert "warm start: trained in" in capsys.readouterr().out
    torch.manual_seed(123)  # what the process did before makes no difference
    loaded = recipe.build_model(tokenizer).state_dict()
    said = capsys.readouterr().out
    assert "warm start: loaded from" in said
    assert "trained" not in said
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)


def test_the_warm_start_leaves_the_process_random_state_alone(recipe, short_warm_start):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    recipe.build_model(recipe.build_tokenizer())
    assert torch.equal(torch.rand(3), expected)


def test_another_constant_is_another_cache(recipe, short_warm_start, monkeypatch):
    before = recipe.warm_start_folder()
    monkeypatch.setitem(recipe.MODEL, "hidden_size", 32)
    assert recipe.warm_start_folder() != before
    assert before.parent.name == "async-grpo"


def test_a_killed_training_leaves_no_half_written_weights(recipe, short_warm_start, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "save_model", die)
        with pytest.raises(KeyboardInterrupt):
            recipe.build_model(recipe.build_tokenizer())
    assert not list(recipe.warm_start_folder().glob("*.safetensors"))
    recipe.build_model(recipe.build_tokenizer())  # the lock is free again


def test_a_process_that_waits_says_how_far_the_other_is_and_gives_up_in_the_end(recipe, tmp_path, capsys):
    from filelock import FileLock

    (tmp_path / recipe.PROGRESS).write_text("part 1 of 2, step 300 of 800")
    with FileLock(tmp_path / "training.lock"), pytest.raises(TimeoutError, match=r"training\.lock"):
        recipe.wait_for(FileLock(tmp_path / "training.lock", is_singleton=False), say_every_s=0.05, at_most_s=0.12)
    assert "another process trains it: part 1 of 2, step 300 of 800 (" in capsys.readouterr().out


# --- The trainer ----------------------------------------------------------------------------------


def test_trainer_for_a_short_run(recipe, short_warm_start, tmp_path, monkeypatch):
    """Two steps, and a checkpoint at the end."""
    from async_grpo.setup.trl_compat import repair_trl

    repair_trl()
    monkeypatch.chdir(tmp_path)  # TRL makes the output directory at once
    trainer = recipe.get_trainer()
    assert [function.__name__ for function in trainer.reward_funcs] == ["accuracy"]
    assert len(trainer.eval_dataset) == 300
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) < 500_000
    trainer.args.output_dir = str(tmp_path / "out")
    trainer.args.max_steps = 2
    trainer.train()
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


# --- The recipe for GSM8K, MATH and MBPP, on a few rows and a tiny model -----------------------------------------

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
