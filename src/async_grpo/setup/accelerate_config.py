"""What a file of `accelerate config` says about the processes of the trainer. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import UsageError

DDP, FSDP, DEEPSPEED = "MULTI_GPU", "FSDP", "DEEPSPEED"


@dataclass(frozen=True, slots=True)
class AccelerateConfig:
    """The fields that decide how many processes there are, where, and what they share."""

    processes: int = 1  # on all machines
    machines: int = 1
    machine: int = 0  # which of them this is, and
    main_process: str = ""  # HOST:PORT of machine 0, where the file says so
    kind: str = DDP
    gpus: tuple[str, ...] = ()  # of the ranks; empty: all that are visible
    fsdp_version: int = 1
    deepspeed: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> AccelerateConfig:
        """Read the file, YAML or JSON. `UsageError`: there is none, or it says none of this."""
        import yaml

        if not path.is_file():
            raise UsageError(f"There is no accelerate configuration {path}. examples/accelerate/ has some.")
        try:
            found = yaml.safe_load(path.read_bytes())
            gpus = str(found.get("gpu_ids", "all"))
            host, port = found.get("main_process_ip"), found.get("main_process_port")
            main_process = f"{host}:{port}" if host and port else ""
            return cls(
                processes=int(found.get("num_processes", 1)),
                machines=int(found.get("num_machines", 1)),
                machine=int(found.get("machine_rank", 0)),
                main_process=main_process,
                kind=str(found.get("distributed_type", DDP)).upper(),
                gpus=()
                if gpus in ("all", "None")
                else tuple(index.strip() for index in gpus.split(",") if index.strip()),
                fsdp_version=int((found.get("fsdp_config") or {}).get("fsdp_version", 1)),
                deepspeed=found.get("deepspeed_config"),
            )
        except (yaml.YAMLError, RecursionError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path} is no configuration of accelerate: {' '.join(str(error).split())}. `accelerate config` writes "
                "one, and examples/accelerate/ has some."
            ) from error

    @property
    def shares_weights(self) -> bool:
        """Whether no process has all of them."""
        return self.kind == FSDP or (self.kind == DEEPSPEED and self.zero_stage() == 3)

    @property
    def sharded_over(self) -> int:
        return self.processes if self.shares_weights else 1

    def zero_stage(self) -> int:
        """DeepSpeed's stage, which the configuration has itself or in the file that it names."""
        settings = self.deepspeed or {}
        file = settings.get("deepspeed_config_file")
        if file is None:
            return int(settings.get("zero_stage", 2))
        try:
            return int(json.loads(Path(file).read_text(encoding="utf-8"))["zero_optimization"]["stage"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"{file}, the deepspeed_config_file of the accelerate configuration, names no stage of ZeRO: "
                f'{error!r}. It must be a file of JSON with {{"zero_optimization": {{"stage": 3}}}}; a relative path '
                "counts from here."
            ) from error
