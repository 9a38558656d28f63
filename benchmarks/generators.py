"""What a worker's engine gives: tokens a second of transformers, of plain vLLM and of our loop around it; new weights.

All in one process and one run, on the same weights, prompts and lengths; sides are interleaved. Run it with the Python
of an environment that has vLLM (`make test-vllm` makes .venv-vllm):

    .venv-vllm/bin/python benchmarks/generators.py --json benchmarks/results/generators.json

"our loop" is everything that a worker does: claiming from a queue, TRL's prompt handling, the engine, scoring, records.
On a GPU, where `scripts/gpu_check.sh engine` runs it: --shape 0.6B, a model of Qwen3-0.6B's shape in bf16.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; threads that spin would slow each other

from benchmarks.table import ROOT, Row, as_text, row, write_json

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "with_vllm" / "setups")]

if TYPE_CHECKING:
    from async_grpo.engines.vllm import VLLMEngine

TOKENS = 64  # of every completion
GROUP = 4  # completions of a prompt
BATCHES = (16, 64, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`shape`: one of benchmarks/setups/qwen3_shape.py, in place of the tests' model with so many layers so wide."""

    hidden: int = 128
    layers: int = 4
    shape: str = ""
    batches: tuple[int, ...] = BATCHES
    repeats: int


MODELS = (
    Model(repeats=11),  # 1 M parameters: a step is mostly Python
    # 20 M: a step is mostly arithmetic; larger batches take many minutes on a CPU
    Model(hidden=512, layers=6, batches=BATCHES[:1], repeats=5),
)


def trainer_of(model: Model) -> Any:
    """A trainer whose completions have exactly TOKENS tokens."""
    from async_grpo.rollout.trl_trainer import RolloutTrainer

    trainer = trainer_of_a_shape(model.shape) if model.shape else trainer_of_the_tests(model.hidden, model.layers)
    trainer.args.generation_kwargs = {"min_new_tokens": TOKENS}
    trainer.generation_config.min_new_tokens = TOKENS
    trainer.args.generation_batch_size = max(model.batches)
    RolloutTrainer(trainer)
    return trainer


def trainer_of_a_shape(shape: str) -> Any:
    """In bf16 on the GPU, where there is one."""
    os.environ |= {"QWEN3_SHAPE": shape, "COMPLETION": str(TOKENS)}
    from benchmarks.setups import qwen3_shape

    return qwen3_shape.get_trainer()


def trainer_of_the_tests(hidden: int, layers: int) -> Any:
    import qwen3_1m
    from transformers import Qwen3Config, Qwen3ForCausalLM

    os.environ["TEST_TOKENS"] = str(TOKENS)
    trainer = qwen3_1m.get_trainer()
    if hidden != 128:
        config = trainer.model.config.to_dict()
        config |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
        config |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64}
        config["initializer_range"] = 0.02  # more, in a wide model, makes denormal numbers, which are slow
        config.pop("layer_types", None)
        trainer.model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    return trainer


def prompts_for(trainer: Any, batch: int) -> list[list[int]]:
    texts = [trainer.train_dataset[index % len(trainer.train_dataset)]["prompt"] for index in range(batch // GROUP)]
    return [ids for text in texts for ids in [trainer.processing_class(text)["input_ids"]] * GROUP]


# --- The sides --------------------------------------------------------------------------------------------


def transformers_side(trainer: Any) -> Callable[[int], float]:
    from async_grpo.engines import PreparedGroup
    from async_grpo.records import Job
    from async_grpo.rollout.engine_choice import transformers_engine
    from async_grpo.rollout.trl_trainer import RolloutTrainer

    engine = transformers_engine(RolloutTrainer(trainer))

    def seconds(batch: int) -> float:
        job = Job(run_id="", seq=0, row={}, num_generations=batch, seed=0, born_version=0, min_version=0)
        group = PreparedGroup(job=job, version=0, prompt_ids=prompts_for(trainer, batch))
        started = time.perf_counter()
        sampled = engine.sample([group])
        while not sampled:
            sampled = engine.sample([])
        took = time.perf_counter() - started
        assert all(len(completion) == TOKENS for completion in sampled[0].tokens)
        return took

    return seconds


def plain_vllm_side(trainer: Any, folder: Path, *, packed: bool) -> Callable[[int], float]:
    """`LLM.generate` as anybody would call it.

    Args:
        packed: as vLLM would have it on a CPU: with weights that are packed for oneDNN once and for all. Ours are
            written again and again, so our engine leaves them as they are. On a GPU nothing is packed.
    """
    import torch
    from vllm import LLM, SamplingParams

    from async_grpo.engines.vllm import keep_weights_unpacked

    if not packed:
        keep_weights_unpacked()
    trainer.model.save_pretrained(folder)
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=str(trainer.model.dtype).removeprefix("torch."),
        enforce_eager=not torch.cuda.is_available(),
        max_num_seqs=trainer.args.generation_batch_size,
        logprobs_mode="processed_logprobs",
        gpu_memory_utilization=trainer.args.vllm_gpu_memory_utilization,
    )
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=TOKENS,
        min_tokens=TOKENS,
        stop_token_ids=list(trainer.eos_token_ids),
        logprobs=0,
        detokenize=False,
    )

    def seconds(batch: int) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in prompts_for(trainer, batch)]
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - started
        assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
        return took

    return seconds


def worker_side(trainer: Any, engine: VLLMEngine, weights: Any, folder: Path) -> Callable[[int], float]:
    """A real worker on a real queue, from the first claim to the last group handed back."""
    from itertools import count

    from async_grpo.engines.continuous import ContinuousEngine
    from async_grpo.queue import ServerQueue, WorkerQueue
    from async_grpo.records import Job
    from async_grpo.rollout.trl_trainer import RolloutTrainer
    from async_grpo.rollout.worker import Worker, WorkerContext
    from async_grpo.settings import WorkerSettings

    server = ServerQueue.open(folder, "bench")
    queue = WorkerQueue.open(folder, 1, "cpu")
    numbers = count()
    left, last = [0], [0.0]
    complete = queue.complete

    def count_down(claim: Any, group: Any) -> None:
        complete(claim, group)
        left[0] -= 1
        last[0] = time.perf_counter()

    queue.complete = count_down  # type: ignore[method-assign]
    state = SimpleNamespace(state="running")
    context = WorkerContext(
        trl=RolloutTrainer(trainer),
        queue=queue,
        weights=weights,
        run=SimpleNamespace(root=folder, read_state=lambda: state),  # type: ignore[arg-type]
        should_stop=lambda: left[0] == 0,
        settings=WorkerSettings(),
        deterministic=False,
    )
    worker = Worker(context, ContinuousEngine(engine, group_size=GROUP))

    def seconds(batch: int) -> float:
        for index in range(batch // GROUP):
            row = {"prompt": trainer.train_dataset[index % len(trainer.train_dataset)]["prompt"]}
            server.submit(
                Job(
                    run_id="bench",
                    seq=next(numbers),
                    row=row,
                    num_generations=GROUP,
                    seed=index,
                    born_version=0,
                    min_version=0,
                )
            )
        left[0] = batch // GROUP
        started = time.perf_counter()
        worker.run()
        took = last[0] - started  # then it looks for more jobs
        for entry in list(server.finished()):
            server.take(entry)
        return took

    return seconds


# --- New weights ------------------------------------------------------------------------------------------


@contextmanager
def exporter_of(model: Model, folder: Path) -> Iterator[Connection]:
    """Another process that publishes the same model; send it a version, and it answers when it began to publish."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_export, args=(theirs, model, str(folder)), daemon=True
    )
    process.start()
    try:
        assert ours.poll(300), "the exporter did not start"
        ours.recv()
        yield ours
    finally:
        ours.send(None)
        process.join(30)
        if process.is_alive():
            process.kill()


def _export(connection: Connection, model: Model, folder: str) -> None:
    from async_grpo_ipc import WeightExporter

    with WeightExporter.from_model(trainer_of(model).model, Path(folder) / "handle.json", slots=3) as exporter:
        exporter.publish(version=0)
        connection.send("ready")
        while (version := connection.recv()) is not None:
            began = time.monotonic()
            exporter.publish(version=version)
            connection.send(began)


def first_token_s(engine: VLLMEngine, weights: Any, publisher: Connection, version: int, prompts: Any) -> float:
    """From the start of `publish` to the first token of the new version, with 16 requests in flight before it."""
    for index, prompt in enumerate(prompts):
        engine.submit(f"before-{version}-{index}", prompt, seed=None, version=version - 1)
    for _ in range(4):
        engine.step()
    publisher.send(version)
    while weights.version != version:
        engine.step()
    while engine.busy:  # --in-flight-update off: what is in flight is finished
        engine.step()
    with weights.lease() as view:
        engine.load(dict(view.items()), view.version)
    engine.submit(f"after-{version}", prompts[0], seed=None, version=version)
    engine.step()
    done = time.monotonic()
    while engine.busy:
        engine.step()
    return done - float(publisher.recv())


def update_seconds(engine: VLLMEngine, weights: Any) -> tuple[float, float]:
    """Our way, from the mapped slot, and vLLM's own `load_weights` of the same tensors in private memory."""
    import torch

    model = engine._runner.get_model()
    with weights.lease() as view:
        private = {name: tensor.clone() for name, tensor in view.items()}
        tied = {id(tensor) for name, tensor in private.items() if name == "lm_head.weight"}
        started = now()
        engine.load(dict(view.items()), view.version)
        ours = now() - started
    own = [(name, tensor) for name, tensor in private.items() if id(tensor) not in tied]
    started = now()
    with torch.no_grad():
        model.load_weights(iter(own))
    return ours, now() - started


def now() -> float:
    """Seconds, once the GPU has done what it was told to."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# --- The table --------------------------------------------------------------------------------------------


def measure(models: Sequence[Model]) -> list[Row]:
    """All rows of each model."""
    from async_grpo.engines.vllm import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rows: list[Row] = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            rows += _measure_model(model, Path(folder))
    return rows


def _measure_model(model: Model, folder: Path) -> list[Row]:
    from async_grpo.engines.vllm import VLLMEngine
    from async_grpo_ipc import open_remote_memory

    (folder / "queue").mkdir(mode=0o700)
    trainer = trainer_of(model)
    size = f"{sum(parameter.numel() for parameter in trainer.model.parameters()) / 1e6:.0f} M"
    sides = {}
    if trainer.model.device.type == "cpu":
        sides["plain vLLM, weights packed for the CPU"] = plain_vllm_side(trainer, folder / "model", packed=True)
    sides["plain vLLM"] = plain_vllm_side(trainer, folder / "model", packed=False)
    engine = VLLMEngine(trainer, seed=1)
    rows: list[Row] = []
    with exporter_of(model, folder) as publisher, open_remote_memory(folder / "handle.json", 60) as weights:
        sides = {"transformers": transformers_side(trainer), **sides}
        sides["vLLM in our worker"] = worker_side(trainer, engine, weights, folder / "queue")
        for batch in model.batches:
            found = _throughput(sides, size, batch, model.repeats)
            print(as_text(found), file=sys.stderr, flush=True)
            rows += found
        prompts = prompts_for(trainer, 16)
        versions = range(1, 2 + 2 * model.repeats)
        waits = [first_token_s(engine, weights, publisher, version, prompts) for version in versions]
        rows.append(row(f"publish to the first token of the new version, {size}", [1e3 * s for s in waits[1:]], "ms"))
        rows += _updates(engine, weights, size, 5 * model.repeats)
    engine.close()
    return rows


def _throughput(sides: dict[str, Callable[[int], float]], size: str, batch: int, repeats: int) -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side(batch)  # warm-up
    for _ in range(repeats):
        for name, side in sides.items():
            seconds[name].append(side(batch))
    rows = [
        row(f"{size}, batch {batch}: {name}", [batch * TOKENS / took for took in times], "tokens/s")
        for name, times in seconds.items()
    ]
    ours, plain = seconds["vLLM in our worker"], seconds["plain vLLM"]
    shares = [theirs / mine for mine, theirs in zip(ours, plain, strict=True)]
    return [*rows, row(f"{size}, batch {batch}: our worker against plain vLLM", shares, "×", target=">= 0.95")]


def _updates(engine: VLLMEngine, weights: Any, size: str, repeats: int) -> list[Row]:
    pairs = [update_seconds(engine, weights) for _ in range(repeats + 1)][1:]
    ours, own = ([1e3 * pair[side] for pair in pairs] for side in (0, 1))
    ratio = statistics.median(ours) / statistics.median(own)
    return [
        row(f"new weights, {size}: from the slot into the engine", ours, "ms"),
        row(f"new weights, {size}: vLLM's load_weights from private memory", own, "ms"),
        row(f"new weights, {size}: ours against vLLM's", [ratio], "×", target="<= 1.2", note="ratio of the medians"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat and a small batch, of one model")
    parser.add_argument("--shape", default="", help="of benchmarks/setups/qwen3_shape.py, in place of the two models")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    models: Sequence[Model] = MODELS
    if args.quick:
        models = [Model(shape=args.shape, batches=BATCHES[:1], repeats=1)]
    elif args.shape:
        models = [Model(shape=args.shape, batches=(64, 512), repeats=3)]
    rows = measure(models)
    print(as_text(rows))
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
