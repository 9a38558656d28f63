"""NCCL for tests without a GPU: what TRL's client would broadcast goes to the `FakeVLLMServer` over HTTP.

It also lets this process believe that vLLM is installed. Everything else of TRL's client is the real thing.
"""

import importlib.util
from types import SimpleNamespace

import requests
import safetensors.torch
import torch
from trl.generation import vllm_client


def install(server_url: str) -> None:
    """From now on TRL's client has this in the place of NCCL."""
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        SimpleNamespace(origin="a test") if name == "vllm" else find_spec(name, package)
    )
    vllm_client.is_vllm_available = lambda min_version=None: True
    vllm_client._HAS_STATEFUL_TRAINER_ENGINE = True
    vllm_client.get_ip = lambda: "127.0.0.1"
    vllm_client.open_trainer_endpoint = lambda init_info: SimpleNamespace(
        rank=0, world_size=init_info["world_size"], group=SimpleNamespace(store=None, socket=None)
    )
    open_on_cuda = vllm_client.VLLMClient.init_communicator
    vllm_client.VLLMClient.init_communicator = lambda self, device: open_on_cuda(self, torch.device("cuda"))

    def broadcast(iterator, group, src, post_iter_func) -> None:
        assert src == group.rank == 0
        tensors = {f"{index:05d}": post_iter_func(item).contiguous() for index, item in enumerate(iterator)}
        requests.post(f"{server_url}/nccl", data=safetensors.torch.save(tensors), timeout=60).raise_for_status()

    vllm_client.packed_nccl_broadcast_producer = broadcast
