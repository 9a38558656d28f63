"""Images in the prompts of vLLM's engine: the tokens are TRL's, and the pixels are what the trainer's processor makes.

Left alone, vLLM would differ from the trainer in three ways. It expects one token in the place of each image and makes
as many of it as the image needs, where TRL's prompt has them all already. It loads a processor of its own. And it turns
pictures as their EXIF data say and lays transparent ones on white, where transformers drops both.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin
from transformers.image_utils import load_image

from async_grpo.engines.vllm_weights import names_of
from async_grpo.errors import UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm.v1.engine.llm_engine import LLMEngine

ENGINE_OPTIONS = {
    "limit_mm_per_prompt": {"video": 0, "audio": 0},  # TRL has neither: no memory is reserved for them
    "mm_device_do_normalize": False,  # the trainer's processor does it; vLLM's model would do it a second time
}
SHOWN = 100  # characters of what names an image: it may be the image itself
_processors: dict[str, Any] = {}  # of the trainers, by the folder that vLLM builds the model from


def process_with(processor: Any, folder: str) -> None:
    """Have the engine that is built from `folder` process images with a copy of the trainer's processor."""
    from vllm.multimodal.processing.context import InputProcessingContext

    own = _processors[folder] = copy.deepcopy(processor)  # reward functions use the trainer's meanwhile
    if not hasattr(own, "video_processor"):  # vLLM asks that one what options it has, though there are no videos
        own.video_processor = own.image_processor
    load: Any = InputProcessingContext.get_hf_processor
    if hasattr(load, "__wrapped__"):  # done before
        return

    @wraps(load)
    def the_trainers(self: Any, typ: Any = ProcessorMixin, /, **options: Any) -> Any:
        own = _processors.get(self.model_config.model)
        return own if isinstance(own, typ) else load(self, typ, **options)

    InputProcessingContext.get_hf_processor = the_trainers


class ImagePrompts:
    """Makes inputs of `engine` from prompts with images."""

    def __init__(self, engine: LLMEngine) -> None:
        self._renderer, self._engine = engine.renderer, engine
        _leave_images_in_place(self._renderer.get_mm_processor())

    def rendered(self, prompt_ids: list[int], images: Sequence[Any]) -> Any:
        """What the engine takes.

        Args:
            prompt_ids: with all the tokens that stand for the images.
            images: as PIL has them, or text that transformers loads images from; in the prompt's order.

        Raises:
            UnsupportedError: an image cannot be read.
            ValueError: vLLM makes other tokens of these images than the trainer's processor.
        """
        data = {"image": [_as_transformers_sees(image) for image in images]}
        (rendered,) = self._renderer.render_cmpl([{"prompt_token_ids": prompt_ids, "multi_modal_data": data}])
        made = list(rendered["prompt_token_ids"])
        if made != prompt_ids:
            raise ValueError(
                f"vLLM would sample from a prompt of {len(made)} tokens where the trainer trains on {len(prompt_ids)}: "
                "it does not find the tokens of the images as the trainer's processor has put them. Take --generator "
                "hf for this model."
            )
        return rendered

    def forget_encoded(self) -> None:
        """Drop encoded images: other weights computed them. Requests in flight have been put back to their prompts."""
        logging.getLogger("vllm.v1.engine.core").addFilter(_matters)
        self._engine.reset_encoder_cache()


def refuse_adapted_encoder(trained: Any, model: Any) -> None:
    """Raise `UnsupportedError` where an adapter changes what computes images: vLLM would drop that part of it.

    Args:
        trained: with the adapter, named as by peft.
    """
    from vllm.lora.utils import parse_fine_tuned_lora_name

    kept = model.get_mm_mapping()
    encoder = (*kept.tower_model, *kept.connector)
    for name, _ in trained.named_parameters():
        if ".lora_" not in name:
            continue
        adapted = name.partition(".lora_")[0]
        module, _ = parse_fine_tuned_lora_name(f"{adapted}.lora_A.weight", names_of(model))
        if module.startswith(encoder):
            raise UnsupportedError(
                f"The adapter changes {adapted}, which computes images, and vLLM takes adapters of the language model "
                "only. Leave it out (exclude_modules of the LoraConfig), or take --generator hf."
            )


def _matters(record: logging.LogRecord) -> bool:
    """False for vLLM's warning of requests in progress: they encode their images again."""
    return "encoder cache when requests are in progress" not in record.getMessage()


def _leave_images_in_place(processor: Any) -> None:
    """Have vLLM's processor find the tokens of images that are there, before it puts any in."""
    put_in = processor._apply_prompt_updates

    def found_or_put_in(token_ids: list[int], updates: Mapping[str, Sequence[Any]]) -> tuple[list[int], Any]:
        found = processor._find_mm_placeholders(token_ids, updates)
        if all(len(found.get(kind, ())) == len(items) for kind, items in updates.items()):
            return token_ids, found
        made: tuple[list[int], Any] = put_in(token_ids, updates)
        return made

    processor._apply_prompt_updates = found_or_put_in


def _as_transformers_sees(image: Any) -> Image:
    """The RGB pixels, and nothing besides that vLLM would act on. `UnsupportedError`: they cannot be read."""
    import PIL.Image

    try:
        opened = load_image(image) if isinstance(image, str) else image
        return PIL.Image.frombytes("RGB", opened.size, opened.convert("RGB").tobytes())
    except Exception as error:  # of a file, of a server, of PIL's many readers
        what, why = (f"{text:.{SHOWN}}{'…' if len(text) > SHOWN else ''}" for text in (repr(image), str(error)))
        raise UnsupportedError(
            f"An image of the prompt, {what}, cannot be read ({type(error).__name__}: {why}). Repair it, or leave out "
            "its row."
        ) from error
