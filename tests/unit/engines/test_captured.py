"""Passes in fixed shapes, and graphs of them, against the loop whose shapes grow: the same tokens for less work."""

from __future__ import annotations

import copy
import importlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import sampler_work
from benchmarks.sampler_work import counted, decoding_loop, work_of_passes
from decoding_models import EOS, GROUPS, PROMPTS, begin, completions, inputs_of, made, plain, with_sliding_window
from decoding_models import run as run_to_the_end
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from async_grpo.engines import captured, decoding, drawing, fewer_kernels, transformers
from async_grpo.engines.captured import DecodeSteps, rounded
from async_grpo.engines.decoding import SamplingLoop
from async_grpo.engines.fixed_batch import FixedBatch
from async_grpo.rollout.engine_choice import transformers_engine
from async_grpo.rollout.trl_trainer import RolloutTrainer
from kit.engines import sample, transformers_of
from kit.tiny_trainer import build_trainer

LENGTHS = [None, (20, 3, 7), (2, 2, 2, 20), (5,)]


def with_caps() -> PreTrainedModel:
    return made("gemma2", head_dim=8, sliding_window=4)


def of_experts() -> PreTrainedModel:
    return made("qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def sampled(model: PreTrainedModel, steps: DecodeSteps | None, lengths: Any = None, **settings: Any) -> SamplingLoop:
    """Decode to the end."""
    torch.manual_seed(3)
    loop = begin(model, inputs_of(settings.pop("prompts", GROUPS), lengths, **settings), steps=steps)
    run_to_the_end(loop)
    return loop


def assert_same(ours: SamplingLoop, wanted: SamplingLoop, within: float = 1e-4) -> None:
    assert completions(ours).tolist() == completions(wanted).tolist()
    assert len({*map(tuple, completions(ours).tolist())}) > 1
    there = torch.arange(completions(ours).shape[1]) < wanted.lengths_B[:, None]
    apart = [loop.logprobs_BC[:, : there.shape[1]][there] for loop in (ours, wanted)]
    torch.testing.assert_close(*apart, atol=within, rtol=0)


@pytest.mark.parametrize("make_model", [plain, with_sliding_window, with_caps, of_experts])
@pytest.mark.parametrize("lengths", LENGTHS[:2])
def test_tokens_are_those_of_shapes_that_grow(make_model: Any, lengths: tuple[int, ...] | None) -> None:
    model, steps = make_model(), DecodeSteps(capture=False)
    for prompts in (GROUPS, PROMPTS[:1] * 6 + PROMPTS[1:2] * 6):  # the buffers of the first are there for the second
        assert_same(sampled(model, steps, lengths, prompts=prompts), sampled(model, None, lengths, prompts=prompts))


class Guidance(LogitsProcessor):
    """Changes each row by what it remembers of it, and says how far that moves the token's distribution."""

    def __init__(self, rows: int) -> None:
        self._favourites_b = torch.arange(rows) % 7 + 2

    def keep(self, rows_b: Tensor) -> None:
        self._favourites_b = self._favourites_b[rows_b]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        guided = scores.scatter_add(1, self._favourites_b[:, None], torch.full_like(scores[:, :1], 2.0))
        self.divergences_b = (guided.softmax(-1) * (guided.log_softmax(-1) - scores.log_softmax(-1))).sum(-1)
        return guided


class EndsBehindPairs(StoppingCriteria):
    """Ends a row where six divides the sum of its last two tokens: behind some pairs, as behind a stop string."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -2:].sum(1) % 6 == 0


@pytest.mark.parametrize("case", ["guidance", "a stopping criterion", "several end tokens", "lengths of single jobs"])
def test_what_a_run_may_ask_for_is_as_in_shapes_that_grow(case: str) -> None:
    def loop(steps: DecodeSteps | None) -> SamplingLoop:
        inputs, more = inputs_of(GROUPS, None, eos_token_id=[EOS, 5, 9] if case == "several end tokens" else -1), {}
        if case == "guidance":
            ends = inputs_of(GROUPS, (20, 3, 7))["logits_processor"]
            inputs["logits_processor"] = LogitsProcessorList([Guidance(len(GROUPS)), *ends])
            inputs["generation_config"].eos_token_id = EOS
        if case == "a stopping criterion":
            inputs["stopping_criteria"] = StoppingCriteriaList([EndsBehindPairs()])
        if case == "lengths of single jobs":
            more = {"group_size": 4, "most_tokens": [3, 20, 9]}
        begun = begin(plain(), inputs, steps=steps, **more)
        run_to_the_end(begun)
        return begun

    ours, wanted = loop(steps := DecodeSteps(capture=False)), loop(None)
    assert steps._rows < len(GROUPS), "rows have left"
    assert_same(ours, wanted)
    assert ours.lengths_B.tolist() == wanted.lengths_B.tolist()
    if case == "guidance":
        torch.testing.assert_close(ours.divergences_BC, wanted.divergences_BC, atol=1e-4, rtol=0)
        assert ours.divergences_BC.max() > 0.1


def test_what_is_drawn_is_the_same_while_no_row_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that leaves takes no random number any more, and here rows leave at other times."""
    monkeypatch.setattr(decoding, "LEAVE_TOGETHER", 0)
    monkeypatch.setattr(captured, "LEAST_ROWS", 16)
    settings = {"do_sample": True, "top_k": 0, "temperature": 0.9}
    assert_same(sampled(plain(), DecodeSteps(capture=False), **settings), sampled(plain(), None, **settings))


def test_mixed_precision_multiplies_the_same_numbers() -> None:
    model, steps = plain(), DecodeSteps(capture=False)
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16):
        wanted = sampled(model, None, prompts=PROMPTS[:1] * 4 + PROMPTS[2:] * 4)
        ours = sampled(model, steps, prompts=PROMPTS[:1] * 4 + PROMPTS[2:] * 4)
    assert_same(ours, wanted, within=0.05)
    assert {it.dtype for it in steps._copies.values()} == {torch.bfloat16}
    assert set(steps._copies) == {f"{name}.weight" for name, it in model.named_modules() if hasattr(it, "in_features")}


def test_a_batch_that_failed_leaves_nothing_behind() -> None:
    """A NaN behind a mask makes NaN of a whole row: a weight of 0 times NaN."""
    model, steps = plain(), DecodeSteps(capture=False)
    wanted = sampled(model, steps)
    for layer in steps._batch._layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    assert_same(sampled(model, steps), wanted, within=0.0)


@pytest.mark.parametrize(
    ("attention", "settings", "reason"),
    [
        ("eager", {}, "the attention of Qwen3ForCausalLM is eager"),
        ("sdpa", {"cache_implementation": "static"}, "its cache is of StaticLayer"),
        ("sdpa", {"use_cache": False}, "its cache is of another kind"),
    ],
)
def test_others_are_decoded_as_before_and_the_log_says_why(
    attention: str, settings: dict[str, Any], reason: str, messages: list[str]
) -> None:
    (model := plain()).set_attn_implementation(attention)
    assert_same(sampled(model, DecodeSteps(capture=True), **settings), sampled(model, None, **settings), within=0.0)
    assert "\n".join(messages).count(f"in growing shapes, kernel by kernel: {reason}") == 1


# --- The work of a pass -----------------------------------------------------------------------------------


UNEQUAL = [list(range(2, 2 + tokens)) for tokens in (19, 5, 12, 8) for _ in range(4)]


@pytest.mark.parametrize("make_model", [plain, with_sliding_window, with_caps, of_experts])
def test_each_pass_is_the_same_work_and_waits_for_nothing(make_model: Any) -> None:
    """So it can be a graph."""
    loop, growing = (decoding_loop(make_model(), UNEQUAL, 40, steps) for steps in (DecodeSteps(capture=False), None))
    first, *others = [work.kernels for work in work_of_passes(loop, 30)[1:]]
    assert all(kernels == first for kernels in others)
    names = {str(kernel[0]) for kernel in first}
    assert not {it for it in names if any(word in it for word in ("_local_scalar_dense", "nonzero"))}
    before, after = work_of_passes(growing, 2)
    assert before.kernels != after.kernels, "the test must see a shape that grows"


def test_no_key_is_copied_for_the_query_heads_that_share_it() -> None:
    model = made("qwen3", head_dim=16, num_attention_heads=8)
    loops = [decoding_loop(model, UNEQUAL, 40, steps) for steps in (None, DecodeSteps(capture=False))]
    growing, fixed = (work_of_passes(loop, 1)[0] for loop in loops)
    heads_of_keys = 2 * 2 * 2 * 16 * 20 * 16 * 4  # layers, keys and values, heads, rows, tokens, width, bytes
    assert growing.bytes - fixed.bytes > 4 * heads_of_keys, "each for four query heads"
    assert len(fixed.kernels) < len(growing.kernels)


@pytest.mark.parametrize(("make_model", "dtype", "norms"), [(plain, torch.bfloat16, 9), (with_caps, torch.float32, 0)])
def test_norms_and_rotations_take_fewer_kernels_where_that_computes_the_same(
    make_model: Any, dtype: torch.dtype, norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's norms add one to their weights."""
    normed, model = [], make_model().to(dtype)
    monkeypatch.setattr(fewer_kernels, "rms_norm", lambda *given: normed.append(given) or torch.rms_norm(*given))
    loop = decoding_loop(model, UNEQUAL, 40, DecodeSteps(capture=False))
    normed.clear()
    (work,) = work_of_passes(loop, 1)
    assert len(normed) == norms
    assert sum("addcmul" in str(kernel) for kernel, *_ in work.kernels) == 2 * model.config.num_hidden_layers
    assert not [it for it in model.modules() if "forward" in vars(it)], "in a pass only"


@pytest.mark.parametrize(("family", "taken"), [("qwen3", True), ("cohere", False), ("gpt_oss", False)])
def test_a_rotation_of_neighbours_or_of_half_the_width_is_left(family: str, taken: bool) -> None:
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert fewer_kernels._rotates(file.apply_rotary_pos_emb) is taken


def test_a_token_is_a_fraction_of_the_launches_and_its_draw_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN3_SHAPE", "tiny")
    monkeypatch.setattr(sampler_work, "BLOCK", 12)  # of its vocabulary, as 4,096 are of one of 150,000
    assert [row.ok for row in counted("tiny", rows=64) if row.target] == [True, True]


# --- Graphs -----------------------------------------------------------------------------------------------


class Recorded(TorchDispatchMode):
    """A CUDA graph as a CPU can have it: replayed are the same kernels on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self.replays = 0
        GRAPHS.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sinh" in str(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._before += [(it, it.clone()) for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        result = func(*args, **kwargs)
        self._kernels.append((func, args, kwargs, [it for it in tree_leaves(result) if isinstance(it, Tensor)]))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, before in reversed(self._before):  # what is captured is not computed
            tensor.copy_(before)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, kept in self._kernels:
            result = func(*args, **kwargs)
            for mine, new in zip(kept, [it for it in tree_leaves(result) if isinstance(it, Tensor)], strict=True):
                if mine.data_ptr() != new.data_ptr():
                    mine.copy_(new)


GRAPHS: list[Recorded] = []
GB = 10**9


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    @contextmanager
    def capture(graph: Recorded, **_: Any) -> Iterator[None]:
        with graph:
            yield

    monkeypatch.setattr(captured, "_undone", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GB - len(GRAPHS) * GB, 80 * GB))
    yield GRAPHS
    GRAPHS.clear()


@pytest.mark.parametrize("make_model", [plain, with_sliding_window, with_caps, of_experts])
def test_graphs_compute_what_passes_do(make_model: Any, graphs: list[Recorded]) -> None:
    model, steps = make_model(), DecodeSteps(capture=True)
    for lengths in LENGTHS:
        assert_same(sampled(model, steps, lengths), sampled(model, None, lengths))
    assert 1 <= len(graphs) <= 3, "of 12, 8 and 4 rows"
    assert sum(graph.replays for graph in graphs) > 50


@pytest.mark.integration
def test_batches_of_other_sizes_take_the_same_memory_in_turn(
    graphs: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = plain(), DecodeSteps(capture=True)
    there: weakref.WeakSet[FixedBatch] = weakref.WeakSet()

    def batch_of(*args: Any) -> FixedBatch:
        assert {*there} == {*steps._batches}, "those of smaller memory are gone before there is other memory"
        there.add(batch := FixedBatch(*args))
        return batch

    monkeypatch.setattr(captured, "FixedBatch", batch_of)
    for tokens, prompts, memory in (
        (20, GROUPS, 12 * 64),
        (100, GROUPS, 12 * 128),
        (20, GROUPS, 12 * 128),
        (20, GROUPS * 2, 12 * 128),  # more rows in the memory that is there
        (100, GROUPS, 12 * 128),
        (20, GROUPS * 3, 40 * 64),
        (300, GROUPS[:4] + GROUPS[8:], 8 * 320),
        (20, GROUPS, 8 * 320),
        (100, GROUPS, 8 * 320),
    ):
        settings = {"max_new_tokens": tokens, "eos_token_id": -1, "prompts": prompts}
        for _ in range(2):
            assert_same(sampled(model, steps, **settings), sampled(model, None, **settings), within=1e-3)
        assert steps._memory.tokens == memory, "never the most rows times the most tokens"


def point_to(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]


def made_by_versions(graphs: list[Recorded], model: PreTrainedModel, steps: DecodeSteps) -> list[int]:
    """Sample seven versions in three slots as plain sampling does; returns how many graphs there were after each."""
    other = copy.deepcopy(model)
    slots = [{name: it.data.clone() for name, it in model.named_parameters()} for _ in range(3)]
    made = []
    for version in range(7):
        torch.manual_seed(version)
        slot = slots[version % 3]
        for tensor in slot.values():
            tensor.normal_(std=0.5)
        point_to(model, slot)
        point_to(other, copy.deepcopy(slot))
        assert_same(sampled(model, steps, eos_token_id=-1), sampled(other, None, eos_token_id=-1))
        made.append(len(graphs))
    return made


def test_the_graphs_of_a_slot_serve_every_version_in_it(graphs: list[Recorded]) -> None:
    assert made_by_versions(graphs, plain(), DecodeSteps(capture=True)) == [1, 2, 3, 3, 3, 3, 3]


def test_a_new_exporter_drops_the_graphs_of_the_one_before(graphs: list[Recorded]) -> None:
    exporter, steps = SimpleNamespace(generation="a"), DecodeSteps(capture=True)
    engine = transformers_of(plain(), 12, 0, EOS, {"do_sample": False}, steps=steps)
    engine.follow(exporter)
    made = []
    for exporter.generation in ("a", "a", "b", "b"):
        sample(engine, PROMPTS)
        made.append(len(graphs))
    assert 0 < made[0] == made[1] and made[2] == made[3] == 2 * made[0] and len(steps._graphs) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_where_the_graphs_of_three_slots_do_not_fit_each_version_is_copied(
    tied: bool, graphs: list[Recorded], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GB - len(graphs) * GB, 80 * GB))
    model = plain()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    steps = DecodeSteps(capture=True)
    assert made_by_versions(graphs, model, steps) == [1, 2, 2, 2, 2, 2, 2]
    assert {*steps._copies} == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert len({it.data_ptr() for it in steps._copies.values()}) == len([*model.parameters()])
    assert "the CUDA graphs of one weight slot take 1.0 GB of the GPU so far" in "\n".join(messages)
    assert "5.0 GB are free, and 2.0 GB of graphs to come" in "\n".join(messages)


@pytest.mark.parametrize(
    ("graphs", "weights", "copied"),
    [(4, 3, False), (6, 3, True), (6, 5, True), (6, 6, False), (5, 3, False)],
    ids=["both fit", "a copy fits", "it fits exactly", "nothing fits", "graphs fit exactly"],
)
def test_what_is_copied_instead_of_more_graphs(graphs: int, weights: int, copied: bool) -> None:
    assert captured.copies_instead(graphs=graphs, weights=weights, free=9, total=80) is copied, "4 of 80 are left"


def test_graphs_leave_a_part_of_the_memory_and_are_made_once_it_is_free(
    graphs: list[Recorded], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps, made = plain(), DecodeSteps(capture=True), []
    for free in (3, 3, 5):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * GB, 80 * GB))
        assert_same(sampled(model, steps), sampled(model, None))
        made.append(len(graphs))
    assert made == [0, 0, 2]
    assert "\n".join(messages).count("fewer CUDA graphs: 3.0 GB of 80.0 GB are free, and they took 0") == 1
    assert captured.Graphs(taken=[2, 10 * GB, 3]).nbytes == 9, "another process took memory meanwhile"


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (lambda module, args, output: output * (output.max().item() != 1e9), "a pass waits for the GPU (aten._local"),
        (lambda module, args, output: output + (0 * output).sinh(), "one could not be made: RuntimeError: oper"),
    ],
)
def test_what_cannot_be_captured_runs_kernel_by_kernel(
    hook: Any, reason: str, graphs: list[Recorded], messages: list[str]
) -> None:
    model = plain()
    hooked = model.model.layers[0].mlp.register_forward_hook(hook)
    ours = sampled(model, steps := DecodeSteps(capture=True))
    hooked.remove()
    assert_same(ours, sampled(model, None))
    assert "\n".join(messages).count(f"no more CUDA graphs: {reason}") == 1
    assert not steps._capture


def test_a_few_shapes_serve_every_batch() -> None:
    assert [rounded(count, 4) for count in (1, 4, 5, 17, 64, 65, 385, 512)] == [4, 4, 8, 20, 64, 80, 448, 512]
    assert len({rounded(count, 64) for count in range(1, 8193)}) < 40


# --- What tokens are drawn by, and by which passes, on a device and in a deterministic run -----------------------


def draw(logits_bV: Tensor, scores_bV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    sampled_b = scores_bV.float().softmax(-1).multinomial(1)[:, 0]
    return sampled_b, (logits_bV.float() / temperature).log_softmax(-1).gather(1, sampled_b[:, None])[:, 0]


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (draw, None),
        (lambda logits, scores, temperature: draw(logits, logits, temperature), "they sample what is ruled out"),
        (lambda logits, scores, temperature: draw(logits, scores, 1.0), "log-probabilities that are"),
    ],
)
def test_a_kernel_is_tried_before_it_is_taken(kernel: Any, reason: str | None) -> None:
    refused = drawing._wrong(kernel, torch.device("cpu"))
    assert refused is None if reason is None else refused is not None and reason in refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs here")
def test_without_the_kernel_tokens_are_drawn_as_before_and_the_log_says_why(messages: list[str]) -> None:
    assert drawing.drawn_on(torch.device("cuda")) is None
    assert "tokens are sampled by torch's kernels, not by those that read the logits once: " in "\n".join(messages)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_keeps_the_loop_whose_tokens_depend_on_no_neighbour(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    trl = RolloutTrainer(build_trainer(tmp_path))
    monkeypatch.setattr(transformers, "TransformersEngine", lambda model, **given: made.update(given))
    monkeypatch.setattr(type(trl.trainer.accelerator), "device", torch.device("cuda"))
    monkeypatch.setattr(drawing, "drawn_on", lambda device: draw)
    transformers_engine(trl, deterministic=deterministic)
    assert (made["steps"] is None, made["draw"]) == (deterministic, None if deterministic else draw)
