"""A value head: one number, or one for each atom of the return, for a prefix that includes the candidate token.

It is a backbone of transformers and a linear layer that begins with zeros. On disk it is a folder:

    head.json           what it is and of what (`HeadRecord`), and the SHA-256 of the weights
    model.safetensors   the weights
    config.json         of the backbone
    vocabulary.json     the tokens by id, for the error that names the first one that differs

B rows, T tokens, K numbers a prefix.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear
from transformers import AutoConfig, AutoModel, PreTrainedModel

from async_grpo.errors import BadFileError, UsageError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import naming, open_plain, read_object
from async_grpo.rundir.shape import as_json, shaped

FORMAT = 1
RECORD, WEIGHTS, VOCABULARY, CONFIG = "head.json", "model.safetensors", "vocabulary.json", "config.json"
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")  # in config.json; each layer has a tensor
_WAY_OUT = "Copy the folder again, or train the head again."

Shape = tuple[int, ...]
SAMPLE = 64  # numbers of each parameter


@dataclass(frozen=True, kw_only=True)
class HeadRecord:
    """What the numbers of a head mean, and which model's sampler they are of.

    Attributes:
        loss: `bce` and `mse` learn p = σ(l), `mle` the distribution over the atoms, `bradley_terry` a score.
    """

    kind: Literal["value", "preference"]  # the labels are returns, or preferences P(b ≻ a)
    loss: Literal["bce", "mse", "mle", "bradley_terry"]
    num_atoms: int = 11  # of `mle`, spread evenly over [v_min, v_max]
    v_min: float = 0.0
    v_max: float = 1.0
    temperature: float  # at which the reference samples
    model: str  # its name or folder
    model_hash: str = ""  # `weights_digest` of it
    tokenizer: str = ""
    vocabulary: str = ""  # digest of its tokens by id
    beta: float = 1.0  # of Bradley–Terry
    weights_hash: str = ""  # SHA-256 of `model.safetensors`; empty before it is saved
    format: int = FORMAT

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any, /, **about: Any) -> HeadRecord:
        """The record of a head for this reference. `about`: the other fields, and `model` where it has no name."""
        name = str(getattr(tokenizer, "name_or_path", ""))
        digest = digest_of(vocabulary_of(tokenizer))
        about = {"model": model.config._name_or_path, **about}
        return cls(model_hash=weights_digest(model), tokenizer=name, vocabulary=digest, **about)

    @property
    def numbers(self) -> int:
        """K."""
        return self.num_atoms if self.loss == "mle" else 1

    @property
    def levels(self) -> Tensor:
        """The returns that the atoms stand for, [K]."""
        return torch.linspace(self.v_min, self.v_max, self.numbers, dtype=torch.float64, device="cpu")


class HeadOutput(NamedTuple):
    """What `ValueHead.forward` returns."""

    logits: Tensor  # [B, T, K], float32
    past_key_values: Any


class ValueHead(nn.Module):
    """A backbone, and `scores`, one linear layer over its last hidden states.

    Args:
        backbone: of transformers, without a head of its own.
        tokens: by id, of the reference's tokenizer.
    """

    def __init__(self, backbone: PreTrainedModel, record: HeadRecord, tokens: list[str | None]) -> None:
        super().__init__()
        self.backbone, self.record, self.tokens = backbone, record, tokens
        self.scores = nn.Linear(backbone.config.get_text_config().hidden_size, record.numbers)
        nn.init.zeros_(self.scores.weight)
        nn.init.zeros_(self.scores.bias)

    @classmethod
    def beginning_from(cls, model: PreTrainedModel | str | Path, record: HeadRecord, tokenizer: Any) -> ValueHead:
        """A head whose backbone begins from these weights: of a small model of the family, or of the reference."""
        if isinstance(model, PreTrainedModel):
            backbone: PreTrainedModel = copy.deepcopy(model.base_model)
        else:
            backbone = AutoModel.from_pretrained(model)
        tokens = vocabulary_of(tokenizer)
        return cls(backbone, replace(record, vocabulary=digest_of(tokens)), tokens).to(backbone.device)

    @classmethod
    def load(cls, folder: str | Path) -> ValueHead:
        """The head of a folder, on the CPU; `checked_record` says what it refuses."""
        folder, record = Path(folder), checked_record(folder)
        tokens, shapes = tokens_of(folder), _shapes_in(folder / WEIGHTS)
        with torch.random.fork_rng(devices=[]):  # a worker loads it when the seed of its first group is set
            with torch.device("meta"):  # takes no memory
                _check_shapes(folder, cls(_backbone_of(folder, shapes), record, tokens).state_dict(), shapes)
            head = cls(_backbone_of(folder, shapes), record, tokens)
        head.load_state_dict(load_file(folder / WEIGHTS), assign=True)
        return head.eval()

    def save(self, folder: str | Path) -> None:
        """Write the folder; `head.json` comes last, so that a half written one is none."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).unlink(missing_ok=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
        self.backbone.config.save_pretrained(folder)
        write_json(folder / VOCABULARY, {"tokens": self.tokens})
        self.record = replace(self.record, weights_hash=_hash_of(folder / WEIGHTS))
        write_json(folder / RECORD, as_json(self.record))

    def forward(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> HeadOutput:
        """The numbers of each prefix: `logits[:, t]` is of the tokens up to and with t.

        Args:
            attention_mask_BT: as transformers' models take it, also a 4-dimensional one.
        """
        hidden = self.backbone(
            input_ids=input_ids_BT,
            attention_mask=attention_mask_BT,
            position_ids=position_ids_BT,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        hidden_BTH = hidden.last_hidden_state.float()
        with torch.autocast(hidden_BTH.device.type, enabled=False):
            logits_BTK = linear(hidden_BTH, self.scores.weight.float(), self.scores.bias.float())
        return HeadOutput(logits_BTK, hidden.past_key_values if use_cache else None)

    def loss(self, logits_BTK: Tensor, labels_BT: Tensor, mask_BT: Tensor, pairs: Tensor | None = None) -> Tensor:
        """The mean loss of the tokens that have a label.

        * `bce`: −y log σ(l) − (1 − y) log σ(−l), y = (z − v_min)/(v_max − v_min);
        * `mse`: (σ(l) − y)²;
        * `mle`: −log p_k, k = round(y·(num_atoms − 1));
        * `bradley_terry`: −y log σ(m_a − m_b) − (1 − y) log σ(m_b − m_a), m being the mean of a row's l, and y the
          label of row a: P(a ≻ b), 1 where a was chosen.

        Args:
            labels_BT: z, the return or the preference.
            mask_BT: which tokens have a label: those after which everything was sampled from the reference.
            pairs: [N, 2], rows a and b of each pair, for `bradley_terry`.

        Returns:
            A scalar.
        """
        record, mask_BT = self.record, mask_BT.to(logits_BTK.dtype)
        if record.loss == "bradley_terry":
            assert pairs is not None, "bradley_terry compares two rows"
            score_B, label_B = (
                (values_BT * mask_BT).sum(1) / mask_BT.sum(1) for values_BT in (logits_BTK[..., 0], labels_BT)
            )
            return binary_cross_entropy_with_logits(score_B[pairs[:, 0]] - score_B[pairs[:, 1]], label_B[pairs[:, 0]])
        shares_BT = ((labels_BT - record.v_min) / (record.v_max - record.v_min)).to(logits_BTK.dtype)
        if record.loss == "mle":
            atoms_BT = (shares_BT * (record.num_atoms - 1)).round().long() * (mask_BT > 0)
            losses_BT = cross_entropy(logits_BTK.flatten(0, 1), atoms_BT.flatten(), reduction="none").view_as(mask_BT)
        elif record.loss == "bce":
            losses_BT = binary_cross_entropy_with_logits(logits_BTK[..., 0], shares_BT, reduction="none")
        else:
            losses_BT = (torch.sigmoid(logits_BTK[..., 0]) - shares_BT) ** 2
        return (losses_BT * mask_BT).sum() / mask_BT.sum()


def checked_record(folder: str | Path) -> HeadRecord:
    """The record of a head on disk, whose weights are those that were saved.

    Raises:
        UsageError: the folder holds no head.
        BadFileError: its record cannot be read, or the weights are not those that were saved.
    """
    folder = Path(folder)
    if not (folder / RECORD).is_file():
        pickled = folder.name == "classifier.pt" or (folder / "classifier.pt").exists()
        pickle = " A classifier.pt is a pickle, which can run any code when it is read: train the head again."
        raise UsageError(f"{folder} holds no value head: it has no {RECORD}.{pickle if pickled else ''}")
    record = shaped(HeadRecord, read_object(folder / RECORD), RECORD)
    if record.format > FORMAT:
        raise BadFileError(
            f"{folder / RECORD} has format {record.format}, and this version reads up to {FORMAT}. Update it."
        )
    if (found := _hash_of(folder / WEIGHTS)) != record.weights_hash:
        raise BadFileError(
            f"{folder / WEIGHTS} is damaged: its SHA-256 is {found}, and {RECORD} has {record.weights_hash}. {_WAY_OUT}"
        )
    return record


def tokens_of(folder: str | Path) -> list[str | None]:
    """The tokens by id, of a head on disk."""
    return shaped(list[str | None], read_object(Path(folder) / VOCABULARY).get("tokens"), VOCABULARY)


def _backbone_of(folder: Path, shapes: Mapping[str, Shape]) -> PreTrainedModel:
    """The backbone that `config.json` describes. `BadFileError`: it describes none, or more layers than there are."""
    described = read_object(folder / CONFIG)
    with naming(folder / CONFIG):
        for part in (described, *(value for value in described.values() if isinstance(value, dict))):
            for name, value in part.items():
                if name in _LAYERS and isinstance(value, int) and value > len(shapes):
                    raise BadFileError(f"{name} is {value:,}, and {WEIGHTS} has {len(shapes):,} tensors. {_WAY_OUT}")
                if name.endswith("_implementation") and value not in (None, "eager", "sdpa"):
                    raise BadFileError(f"{name} may name code of the Hub, which a head has none of. Remove that line.")
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            backbone: PreTrainedModel = AutoModel.from_config(config, trust_remote_code=False)
        except Exception as error:  # whatever transformers raises
            raise BadFileError(f"transformers makes no model of it: {error}") from error
    return backbone


def _shapes_in(file: Path) -> dict[str, Shape]:
    """The shape of each tensor, from the header of the file."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.offset_keys()}
    except SafetensorError as error:
        raise BadFileError(f"{file} is not a file of safetensors: {error}. {_WAY_OUT}") from error


def _check_shapes(folder: Path, made: Mapping[str, Tensor], saved: Mapping[str, Shape]) -> None:
    for name in sorted({*made, *saved}):
        ours, theirs = tuple(made[name].shape) if name in made else "not there", saved.get(name, "not there")
        if ours != theirs:
            raise BadFileError(
                f"{folder / CONFIG} and {WEIGHTS} are of different heads: {name} is {ours} by the former, and {theirs} "
                f"in the latter. {_WAY_OUT}"
            )


def _hash_of(file: Path) -> str:
    with naming(file), os.fdopen(open_plain(file), "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def vocabulary_of(tokenizer: Any) -> list[str | None]:
    """The tokens by id, None for an id without one. Rows that pad the embedding are not among them."""
    ids = getattr(tokenizer, "tokenizer", tokenizer).get_vocab()  # a processor has its tokenizer in it
    tokens: list[str | None] = [None] * (max(ids.values()) + 1)
    for token, index in ids.items():
        tokens[index] = token
    return tokens


def digest_of(tokens: Sequence[str | None]) -> str:
    """SHA-256 of the tokens by id, hexadecimal."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the names and shapes of the parameters and of evenly spaced numbers of each, hexadecimal.

    A whole hash would take seconds, and workers ask at every batch, as weights may change between two. So it finds the
    wrong model, and one that was trained on; it is no proof that all numbers are the same. They are rounded to bfloat16
    first, so that one model has one digest, whether it is loaded in bfloat16 or float32.
    """
    digest, sampled = hashlib.sha256(), []
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            flat = parameter.detach().flatten()
            sampled.append(flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].to(torch.bfloat16))
        digest.update(torch.cat(sampled).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
