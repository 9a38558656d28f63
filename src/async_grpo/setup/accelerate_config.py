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
    def read(cls, path: Path | None) -> AccelerateConfig:
        """Read the file, YAML or JSON; None is one process. `UsageError`: it is not there, or says none of this."""
        if path is None:
            return cls()
        import yaml

        if not path.is_file():
            raise UsageError(f"There is no accelerate configuration {path}. examples/accelerate/ has some.")
        try:
            found = yaml.safe_load(path.read_bytes())
            gpus = str(found.get("gpu_ids", "all")).replace("all", "").replace("None", "")
            main_process = [found.get(f"main_process_{part}") for part in ("ip", "port")]
            return cls(
                processes=int(found.get("num_processes", 1)),
                machines=int(found.get("num_machines") or 1),
                machine=int(found.get("machine_rank") or 0),
                main_process=":".join(map(str, main_process)) if all(main_process) else "",
                kind=str(found.get("distributed_type", DDP)).upper(),
                gpus=tuple(filter(None, map(str.strip, gpus.split(",")))),
                fsdp_version=int((found.get("fsdp_config") or {}).get("fsdp_version", 1)),
                deepspeed=found.get("deepspeed_config"),
            )
        except (yaml.YAMLError, RecursionError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path} is no configuration of accelerate: {' '.join(str(error).split())}. `accelerate config` writes "
                "one, and examples/accelerate/ has some."
            ) from error

    def number_of(self, asked: int | None) -> int:
        """Which of the machines this is, where the command line says so or not; 0 where there is one."""
        return 0 if self.machines == 1 else self.machine if asked is None else asked

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
