"""The declaration of a trainer class whose algorithm is not TRL's GRPO: its columns, its loss, what teaches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

if TYPE_CHECKING:
    import torch

    from async_grpo.records import RolloutGroup


class Algorithm:
    """Declares what a run must know of a trainer class that computes other advantages, or another loss, than TRL.

    A trainer class names it before `GRPOTrainer` among its bases, and says only what differs:

        class PPOTrainer(Algorithm, GRPOTrainer):
            own_loss = True  # _compute_loss has its own clipping, and does not call TRL's
            token_columns = ("values", "returns")  # [B, C], which _generate_and_score_completions adds to TRL's output

            def teaches_nothing(self, group: RolloutGroup) -> bool:
                return False  # the critic learns from equal rewards too

    A class that declares itself leaves the making of completions to TRL: it may override `_generate` or
    `_generate_and_score_completions` to look at what TRL makes, and workers then sample as for TRL's own class. A
    user's subclass of `GRPOTrainer`, or of such a class, declares nothing; what it overrides is found by its code.
    """

    own_loss: ClassVar[bool | None] = None
    """Whether the loss neither calls TRL's nor multiplies by `importance_sampling_ratio` of its inputs.

    A correction then weighs the advantages, which get the shape [B, C], and `--correction trl` is refused. None: the
    code of `_compute_loss` and `compute_loss` decides, as for a user's class.
    """
    group_columns: ClassVar[tuple[str, ...]] = ()
    """Optional fields of `RolloutGroup` that workers fill by `columns_of`. A group without them is refused."""
    token_columns: ClassVar[tuple[str, ...]] = ()
    """Names of further tensors of the batch, each [B, C]: a value for each of the C tokens of B completions."""

    compares_groups: ClassVar[bool] = True
    """Whether advantages compare the completions of a group.

    Otherwise a group of one completion, or of equal rewards, teaches as any other: `--filter-zero-variance` is refused,
    and what reads the archive shows no advantages.
    """

    def columns_of(self, part: slice, masks: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the `group_columns` of one group as numpy arrays. Workers call it after `_calculate_rewards`.

        Args:
            part: the completions of the group among those that were scored last.
            masks: of each of them, 1 for what the model wrote, one entry a token.
        """
        return {}

    def take_rewards(self, rewards: torch.Tensor, groups: Sequence[RolloutGroup]) -> None:
        """Take what workers scored, in place of `_calculate_rewards`, while TRL assembles a batch.

        Args:
            rewards: of all completions of the batch, [B, F], on the trainer's device.
            groups: of the batch; on another rank than 0 those that it has rows of (`setup.rank_share`).
        """

    def teaches_nothing(self, group: RolloutGroup) -> bool:
        """Return whether the group would change no weight. `--filter-zero-variance` puts another in its place."""
        raise NotImplementedError(f"{type(self).__name__} does not say which groups teach nothing")

    def trained_besides(self) -> int:
        """Return how many numbers the class trains beside the model, in fp32 with AdamW. A checkpoint has them."""
        return 0


def compares_groups(trainer: object) -> bool:
    """Return whether this trainer's advantages compare the completions of a group, as TRL's do."""
    return not isinstance(trainer, Algorithm) or trainer.compares_groups


def trained_besides(trainer: object) -> int:
    """Return how many numbers this trainer trains beside its model, in fp32 with AdamW."""
    return trainer.trained_besides() if isinstance(trainer, Algorithm) else 0


def gradients_besides(trainer: object) -> int:
    """Return how many gradients of the whole model this trainer holds beside TRL's; PCGrad holds one of each task."""
    return int(getattr(trainer, "gradients_besides", 0))


def declares(cls: type) -> TypeGuard[type[Algorithm]]:
    """Return whether this very class declares its algorithm; a user's subclass of one that does need not."""
    return Algorithm in cls.__bases__
