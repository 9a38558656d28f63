"""Any trainer feeds a vLLM server on the same machine through memory: no NCCL, no file, also with tensor parallelism.

1. VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
       --weight-transfer-config '{"backend": "async_grpo_ipc"}'
2. python examples/feed_vllm.py MODEL http://127.0.0.1:8000

The trainer here is five steps of AdamW that teach the model one sentence; the server is asked after each of them.
"""

import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo_ipc import FeedError, VLLMFeed, WeightExporter

SENTENCE = "1+1=2"
STEPS = 5


def ask(url: str, model: str, prompt: list[int]) -> list[int]:
    """The six most likely next tokens, as the server has the weights."""
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urlopen(request, timeout=60))["choices"][0]["token_ids"]


def main(name: str, url: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.tensor([tokenizer(SENTENCE)["input_ids"]])
    with WeightExporter.from_model(model, Path("feed_vllm_run/handle.json")) as exporter:
        feed = VLLMFeed(url, exporter.path)
        for step in range(1, STEPS + 1):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            exporter.publish(version=step)
            feed.take(step)
            tokens = ask(url, name, ids[0, :2].tolist())
            print(f"version {step}: loss {loss.item():.3f}, the server says {tokenizer.decode(tokens)!r}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except FeedError as error:
        sys.exit(str(error))
