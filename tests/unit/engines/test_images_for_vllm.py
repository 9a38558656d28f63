"""Images on their way to an engine such as vLLM's. The real one: `tests/with_vllm/test_vllm_images.py`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from async_grpo.engines import PreparedGroup
from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.engines.vllm_images import ImagePrompts
from async_grpo.errors import GeneratorError, UnsupportedError
from kit.engines import group
from kit.worker_fakes import FakeEngine

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
