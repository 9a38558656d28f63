"""Rows of parquet files: what each cell becomes, and that no cell is repaired."""

from __future__ import annotations

import ast
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parquet_files import RULE, parquet, row

from async_grpo.errors import UsageError
from async_grpo.tasks import data, load, unpacked
from async_grpo.tasks.task_files import LARGEST

COLUMNS = ["prompt", "task", "data_source", "ability", "ground_truth", "extra_info"]


def truths(path: Path) -> list[Any]:
    return [json.loads(text) for text in load(path)["ground_truth"]]


def test_the_columns_of_a_row(tmp_path: Path) -> None:
    dataset = load(parquet(tmp_path / "math__sums_3.parquet"))
    assert dataset.column_names == COLUMNS
    assert dataset[0] == {
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "task": "math",
        "data_source": "math__sums",
        "ability": "math",
        "ground_truth": '"4"',
        "extra_info": '{"split": "train", "index": 0}',
    }


@pytest.mark.parametrize("write", [dict, json.dumps, repr], ids=["struct", "JSON", "Python"])
def test_structs_json_and_literals_say_the_same(tmp_path: Path, write: Any) -> None:
    path = parquet(tmp_path / "a.parquet", row(reward_model=write(RULE), extra_info=write({"index": 3, "x": None})))
    loaded = load(path)[0]
    assert json.loads(loaded["ground_truth"]) == "4"
    assert json.loads(loaded["extra_info"]) == {"index": 3, "x": None}


def test_tasks_with_different_ground_truths_are_one_dataset(tmp_path: Path) -> None:
    cells = {"header": ["a"], "rows": [["b"]]}
    zebra = row(data_source="logic__zebra", reward_model={**RULE, "ground_truth": cells})
    math, logic = parquet(tmp_path / "math.parquet", row(), row()), parquet(tmp_path / "logic.parquet", zebra)
    both = load({"math": math, "logic": [logic]})
    assert both["task"] == ["math", "math", "logic"]
    assert json.loads(both[2]["ground_truth"]) == cells
    apart = load({"math": math, "logic": logic}, separate=True)
    assert {task: len(rows) for task, rows in apart.items()} == {"math": 2, "logic": 1}


def test_columns_that_are_not_there_are_empty(tmp_path: Path) -> None:
    given = {name: value for name, value in row().items() if name not in ("ability", "extra_info")}
    loaded = load(parquet(tmp_path / "a.parquet", given))[0]
    assert (loaded["ability"], json.loads(loaded["extra_info"])) == ("", None)


MESSAGES = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("prompt", "templated", "becomes"),
    [
        (MESSAGES, None, MESSAGES),
        (MESSAGES, True, MESSAGES),
        (MESSAGES, False, "2 + 2?"),
        ("2 + 2?", None, "2 + 2?"),
        ("2 + 2?", False, "2 + 2?"),
        ("2 + 2?", True, MESSAGES),
    ],
)
def test_a_prompt_is_messages_or_text(tmp_path: Path, prompt: Any, templated: bool | None, becomes: Any) -> None:
    path = parquet(tmp_path / "a.parquet", row(prompt=prompt, apply_chat_template=templated))
    assert load(path)[0]["prompt"] == becomes


class Tokenizer:
    """A tokenizer of which only the template is needed."""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"


def test_messages_and_text_need_a_tokenizer(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "3 + 3?"}]
    more = parquet(tmp_path / "b.parquet", row(apply_chat_template=None), row(prompt=asked, apply_chat_template=False))
    files = [parquet(tmp_path / "a.parquet"), more]
    with pytest.raises(UsageError, match=r"b\.parquet, row 2 is text, and that of a\.parquet, row 1 is not"):
        load(files)
    assert load(files, tokenizer=Tokenizer())["prompt"] == ["<user>2 + 2?<assistant>"] * 2 + ["3 + 3?"]


NULL = {"style": "rule", "ground_truth": None}


NEITHER = "reward_model is neither JSON nor a Python literal"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward_model": "{'style': 'rule'"}, "keys that are texts): \"{'style': 'rule'\""),
        ({"reward_model": "__import__('os').system('touch x')"}, NEITHER),
        ({"reward_model": "[" * 9000}, NEITHER),
        ({"reward_model": "'" + "a" * LARGEST + "'"}, NEITHER),
        ({"reward_model": "{'ground_truth': {1, 2}}"}, NEITHER),
        ({"reward_model": "{'ground_truth': {1: 'a'}}"}, NEITHER),
        *(({"reward_model": of}, "ground_truth is missing") for of in ("{'style': 'rule'}", json.dumps(NULL), "4")),
        ({"reward_model": r"{'ground_truth': '\ud800\udc00'}"}, "ground_truth holds what JSON has not"),
        ({"reward_model": '{"ground_truth": NaN}'}, "ground_truth holds what JSON has not"),
        ({"extra_info": "oops"}, "extra_info is neither JSON nor a Python literal"),
        *(({"data_source": source}, "data_source is no text") for source in ("", None)),
        ({"prompt": []}, "prompt is neither a text nor a list of messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "prompt is neither a text nor a list of messages"),
        ({"prompt": MESSAGES * 2, "apply_chat_template": False}, "prompt has 2 messages, not 1"),
    ],
    ids=str,
)
def test_a_bad_cell_is_named_by_file_row_and_column(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    good = row(reward_model=json.dumps(RULE), extra_info="{}", apply_chat_template=None)
    path = parquet(tmp_path / "math.parquet", *[good] * 1499, {**good, **change}, good)
    with pytest.raises(UsageError) as error:
        load(path)
    assert str(error.value).startswith("math.parquet, row 1,500: ") and says in str(error.value)


def test_nothing_of_a_cell_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        load(parquet(tmp_path / "a.parquet", row(reward_model="__import__('pathlib').Path('ran').touch()")))
    assert not Path("ran").exists()


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "text.parquet").write_text("no parquet")
    without = parquet(tmp_path / "math.parquet", {"data_source": "math", "prompt": "x"})
    nothing = parquet(tmp_path / "stem.parquet", row())
    pq.write_table(pq.read_table(nothing).slice(0, 0), nothing)
    for path, says in (
        (tmp_path / "none.parquet", r"There is no file .*none\.parquet"),
        (tmp_path / "empty.parquet", r"empty\.parquet cannot be read as parquet"),
        (tmp_path / "text.parquet", r"text\.parquet cannot be read as parquet"),
        (tmp_path, "cannot be read as parquet"),
        (without, r"math\.parquet has no column reward_model\. It needs data_source, prompt, reward_model\."),
        (nothing, r"task 'stem' has no rows \(stem\.parquet\)"),
    ):
        with pytest.raises(UsageError, match=says):
            load(path)


TRUTH = {"reward_model": [json.dumps(RULE)] * 2000, "data_source": ["math"] * 2000}
LONG = ["a" * 1000] * 2000
MANY = pa.array([[]] * 1999 + [[("b", "c" * 99)] * 9999], pa.map_(pa.string(), pa.string()))
PREFIXED = {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}


@pytest.mark.parametrize(
    ("columns", "written", "says"),
    [
        ({"prompt": LONG}, {}, r", row 9\d\d, and those before it take 1\.0 MB when unpacked"),
        ({"prompt": [[{"content": text}] for text in LONG]}, {}, r", row 9\d\d, and those before it take 1\.0 MB"),
        ({"prompt": MANY}, {}, r", row 2,000, and those before it take 1\.\d MB when unpacked"),
        ({"prompt": LONG}, {"use_dictionary": False}, r": its 2,000 rows take 2\.\d MB when unpacked"),
        ({"extra_info": [{"x": [None] * 99}] * 2000}, {}, r": its 2,000 rows take 1\.\d MB when unpacked"),
        ({"prompt": LONG}, PREFIXED, r": the encoding of column prompt \(DELTA…\) does not say how large it is"),
    ],
)
def test_rows_that_are_large_when_unpacked_are_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], written: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(unpacked, "LARGEST", 1_000_000)
    monkeypatch.setattr(data, "_prompt", None)  # no row is read
    pq.write_table(pa.table({"prompt": ["a"] * 2000, **TRUTH, **columns}), tmp_path / "a.parquet", **written)
    with pytest.raises(UsageError, match=rf"^a\.parquet{says}"):
        load(tmp_path / "a.parquet")


def test_a_file_of_kilobytes_costs_no_gigabytes(tmp_path: Path) -> None:
    """20,000 rows refer to one text. The pool of Arrow counts what it gives."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["a" * 220_000]))
    cells = {name: values[:1] * 20_000 for name, values in TRUTH.items()}
    table = pa.table({"prompt": text, **cells})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)  # a column of plain texts
    assert (tmp_path / "a.parquet").stat().st_size < 3000
    before = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(before)
    pa.set_memory_pool(counted)
    try:
        with pytest.raises(UsageError, match=r"^a\.parquet, row 9,\d+, and those before it take 2\.1 GB when unpacked"):
            load(tmp_path / "a.parquet")
    finally:
        pa.set_memory_pool(before)
    assert 0 < counted.max_memory() < 100_000_000


def test_rows_are_held_as_columns(tmp_path: Path) -> None:
    """The dictionaries of a row and its message would be over 500 bytes of Python."""
    path = parquet(tmp_path / "a.parquet", *[row()] * 4_000)
    load(path)  # what is imported and kept for later
    tracemalloc.start()
    loaded = load(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaded) == 4_000 and most < 200 * 4_000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read_by_python(text: str) -> Any:
    """What a cell says, by the readers of Python alone; `None` where it says nothing, or no ground truth."""
    for reader in (json.loads, ast.literal_eval):
        try:
            found = reader(text)
            break
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    else:
        return None
    return found.get("ground_truth") if isinstance(found, dict) else None


@settings(deadline=None, max_examples=60)
@given(value=VALUES, write=st.sampled_from([json.dumps, repr]), cut=st.integers(0, 200), swap=st.text(max_size=2))
def test_a_cell_is_what_it_says_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, write: Any, cut: int, swap: str
) -> None:
    """Whole, or damaged at a byte: whatever is loaded is exactly what the text says."""
    whole = write({"style": "rule", "ground_truth": value})
    path = tmp_path_factory.mktemp("cell") / "a.parquet"
    for text in (whole, whole[:cut] + swap + whole[cut + 1 :]):
        try:
            parquet(path, row(reward_model=text))
        except UnicodeEncodeError:  # half of a pair of surrogates: no file holds it
            continue
        expected = read_by_python(text)
        try:
            (loaded,) = truths(path)
        except UsageError as error:
            assert str(error).startswith("a.parquet, row 1: ")
            assert expected is None or "what JSON has not" in str(error) or "keys that are texts" in str(error)
        else:
            assert expected is not None
            assert repr(loaded) == repr(expected) or loaded == json.loads(json.dumps(expected))
