"""The tokens that vLLM kept, from its output to the record of a group; and what it asks of settings for that."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from async_grpo.engines import Chunk, PreparedGroup, SampledGroup
from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.engines.vllm_images import ImagePrompts
from async_grpo.engines.vllm_sampling import kept_of, set_own
from async_grpo.errors import BadGroupError, GeneratorError, UnsupportedError
from async_grpo.records import Timings
from async_grpo.rollout.trl_group import GeneratedGroup, Scores, to_record
from async_grpo.tokens import Tokens
from async_grpo.tokens.kept_tokens import unpack
from kit.engines import group
from kit.worker_fakes import FakeEngine


def kept(*sets: list[int]) -> list[bytes]:
    return [np.array(each, np.int32).tobytes() for each in sets]


class TwoSteps:
    """An engine that writes two tokens for each request, one a step, and names what it kept."""

    max_num_seqs, versions_at_once = 8, 1

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.steps = 0

    @property
    def busy(self) -> bool:
        return self.steps < 2

    def submit(self, request_id: str, prompt_ids: list[int], **_: Any) -> None:
        self.requests.append(request_id)

    def step(self) -> list[Chunk]:
        self.steps += 1
        return [
            Chunk(name, Tokens([self.steps], [-0.5], kept=kept([self.steps, int(name) + 10])), self.steps == 2)
            for name in self.requests
        ]


def sampled(purpose: Any = "train") -> SampledGroup:
    asked = group([[1], [2]])
    engine = ContinuousEngine(TwoSteps(), group_size=2)  # type: ignore[arg-type]
    assert engine.sample([replace(asked, job=replace(asked.job, purpose=purpose))]) == []
    [ended] = engine.sample([])
    return ended


def test_the_sets_of_a_group_are_collected_with_its_tokens() -> None:
    assert [tokens.kept for tokens in sampled().tokens] == [kept([1, 10], [2, 10]), kept([1, 11], [2, 11])]


@pytest.mark.parametrize("purpose", ["eval", "generate"])
def test_what_nobody_trains_on_needs_no_sets(purpose: str) -> None:
    assert not any(tokens.names_kept for tokens in sampled(purpose).tokens)


def generated(sets: list[list[bytes]] | None) -> GeneratedGroup:
    asked = group([[1], [1]])
    first, second = sets or [[b"", b""], [b""]]
    return GeneratedGroup(
        job=replace(asked.job, row={"prompt": "p"}),
        begun_by=0,
        rows=[{"prompt": "p"}] * 2,
        prompts=["p"] * 2,
        completions=["c"] * 2,
        prompt_ids=[[1], [1]],
        tokens=[Tokens([1, 2], [-0.5, -0.5], kept=first), Tokens([3], [-0.5], kept=second)],
        has_masks=False,
        environments=None,
        metrics={},
    )


def record_of(sets: list[list[bytes]] | None) -> Any:
    scores = Scores(names=("r",), rewards=torch.zeros(2, 1), metrics={}, extra_columns={})
    return to_record(generated(sets), scores, attempt=0, worker="dev1", timings=Timings())


def test_the_record_of_a_group_has_them() -> None:
    record = record_of([kept([1, 7], []), kept([3])])
    found = unpack(record.kept_tokens, record.completion_ids)
    assert (found.sizes.tolist(), found.ids.tolist()) == ([2, 0, 1], [1, 7, 3])
    assert record_of(None).kept_tokens is None
    with pytest.raises(BadGroupError, match="not among the tokens that the sampler says it kept"):
        record_of([kept([7], []), kept([3])])


def completion(sets: list[list[int]] | None) -> SimpleNamespace:
    mask = None if sets is None else SimpleNamespace(token_ids=sets)
    return SimpleNamespace(token_ids=[5, 6], sampling_mask=mask)


def test_sets_are_read_from_vllms_output() -> None:
    assert kept_of(completion([[1, 5], [6]])) == kept([1, 5], [6])
    for missing in (None, [[5]]):
        with pytest.raises(GeneratorError, match=r"kept tokens of \d places for 2 tokens"):
            kept_of(completion(missing))


def settings(**changes: float) -> Any:
    return SimpleNamespace(**{"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.1, **changes})


def test_a_greedy_evaluation_by_an_engine_that_names_what_it_kept() -> None:
    """vLLM takes no temperature of 0 there; one token to choose from is the same."""
    sampling = settings()
    set_own(sampling, {"temperature": 0, "top_p": 0.5, "top_k": 0}, returns_kept=True)
    assert sampling == settings(temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
    sampling = settings()
    set_own(sampling, {"temperature": 0}, returns_kept=False)
    assert sampling == settings(temperature=0, top_p=1.0, top_k=0, min_p=0.0)


def test_an_evaluation_without_top_k_cannot_be_had_of_such_an_engine() -> None:
    with pytest.raises(ValueError, match="--eval-top-k"):
        set_own(settings(), {"temperature": 0.6, "top_k": 0}, returns_kept=True)
    set_own(settings(), {"temperature": 0.6, "top_k": 0}, returns_kept=False)
    set_own(settings(top_k=0), {}, returns_kept=False)


# --- Images on their way to an engine such as vLLM's -------------------------------------------------------------

IMAGE, TEXT = 9, 1


class SeeingEngine(FakeEngine):
    """Notes the images; it can see those that are words."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def submit(self, *arguments: Any, images: Any, **options: Any) -> None:
        if images == ["another"]:
            raise UnsupportedError("not such an image")
        if images == ["gone.png"]:
            raise FileNotFoundError("no such file: gone.png")
        self.seen.append(images)
        super().submit(*arguments, images=images, **options)


def with_images(*images: Any) -> PreparedGroup:
    prepared = group([[4], [4]])
    return PreparedGroup(job=replace(prepared.job), version=0, prompt_ids=prepared.prompt_ids, images=list(images))


def test_each_completion_gets_the_images_of_its_prompt() -> None:
    engine = SeeingEngine()
    continuous = ContinuousEngine(engine, group_size=2)  # type: ignore[arg-type]
    continuous.sample([with_images(["a", "b"], None)])
    continuous.sample([group([[4], [4]], seq=1)])
    assert engine.seen == [["a", "b"], None, None, None]


@pytest.mark.parametrize(("image", "why"), [("another", "not such an image"), ("gone.png", "no such file")])
def test_images_that_the_engine_refuses_or_cannot_read_fail_their_group_alone(image: str, why: str) -> None:
    engine = SeeingEngine()
    continuous = ContinuousEngine(engine, group_size=2)  # type: ignore[arg-type]
    (failed,) = continuous.sample([with_images(["a"], [image])])
    assert why in str(failed.error)
    assert not engine.busy, "nothing of it is left"


def test_an_engine_that_breaks_while_it_takes_a_group_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SeeingEngine()
    monkeypatch.setattr(engine, "submit", broken)
    with pytest.raises(GeneratorError, match="is gone"):
        ContinuousEngine(engine, group_size=2).sample([with_images(["a"], ["b"])])  # type: ignore[arg-type]


def broken(*arguments: Any, **options: Any) -> None:
    raise GeneratorError("the engine is gone")


class Renderer:
    """As vLLM's: it puts `made` tokens in the place of the first one of an image."""

    def __init__(self, made: int) -> None:
        self.made, self.pictures = made, []  # type: ignore[var-annotated]
        self.processor = SimpleNamespace(_find_mm_placeholders=self.find, _apply_prompt_updates=self.put_in)

    def get_mm_processor(self) -> Any:
        return self.processor

    def find(self, ids: list[int], updates: Any) -> Any:
        starts = [start for start in range(len(ids)) if ids[start : start + self.made] == [IMAGE] * self.made]
        return {"image": starts[:1]}

    def put_in(self, ids: list[int], updates: Any) -> Any:
        start = ids.index(IMAGE)
        return [*ids[:start], *[IMAGE] * self.made, *ids[start + 1 :]], {"image": [start]}

    def render_cmpl(self, prompts: Any) -> Any:
        self.pictures = prompts[0]["multi_modal_data"]["image"]
        ids, _ = self.processor._apply_prompt_updates(prompts[0]["prompt_token_ids"], {"image": self.pictures})
        return [{"prompt_token_ids": ids}]


def prompts(renderer: Renderer) -> ImagePrompts:
    return ImagePrompts(SimpleNamespace(renderer=renderer))  # type: ignore[arg-type]


def test_tokens_that_are_there_are_not_put_in_again() -> None:
    renderer = Renderer(made=3)
    ids = [TEXT, IMAGE, IMAGE, IMAGE, TEXT]
    assert prompts(renderer).rendered(ids, [Image.new("RGB", (2, 2))])["prompt_token_ids"] == ids
    assert renderer.processor._apply_prompt_updates([TEXT, IMAGE], {"image": [0]})[0] == [TEXT, *[IMAGE] * 3], (
        "a prompt that vLLM makes up while it starts has one token an image"
    )


def test_another_prompt_than_the_trainers_is_not_sampled_from() -> None:
    with pytest.raises(ValueError, match=r"of 6 tokens where the trainer trains on 4.*--generator hf"):
        prompts(Renderer(made=3)).rendered([TEXT, IMAGE, IMAGE, TEXT], [Image.new("RGB", (2, 2))])


@pytest.mark.parametrize(
    "image", ["nowhere/gone.png", "http://127.0.0.1:1/gone.png", f"data:image/png;base64,{'A' * 9999}"]
)
def test_an_image_that_cannot_be_read_is_named(image: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'(nowhere|http|data).* cannot be read.*Repair it") as raised:
        prompts(Renderer(made=1)).rendered([IMAGE], [image])
    assert len(str(raised.value)) < 500, "a picture that is given as text is long"


def test_pixels_are_those_that_transformers_sees() -> None:
    transparent = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    turned = Image.new("RGB", (2, 1), (1, 2, 3))
    turned.getexif()[0x0112] = 6
    renderer = Renderer(made=1)
    prompts(renderer).rendered([IMAGE, IMAGE], [transparent, turned])
    first, second = renderer.pictures
    assert (first.mode, first.getpixel((0, 0))) == ("RGB", (10, 20, 30)), "vLLM would lay it on white"
    assert (second.size, dict(second.getexif())) == ((2, 1), {}), "vLLM would turn it"
