"""Which corrections there are, at which levels, between which bounds, and where each comes from.

The ratio r is clipped by TRL's loss; w multiplies the loss of a token and is a constant (no gradient flows through it).

    bypass      ratio pi / mu in TRL's clipped loss, and no weight.
                PPO's clip (Schulman et al. 2017, arXiv 1707.06347, section 3, eq. 7, page 3) around the sampler; TRL's
                own asynchronous trainer and verl's `bypass_mode` do the same.
    decoupled   w * min(r A, clip(r) A), w = pi_old / mu where it is at most 5, else 0.
                Hilton et al. 2021, arXiv 2110.00641, section 2; AReaL, arXiv 2505.24298, section 5.2, eqs. 4 and 5,
                page 6. The mask is that of AReaL's code: `apply_rejection_sampling` with the defaults of
                `RejectionSamplingConfig` (level token, action mask, upper 5.0), formerly `behave_imp_weight_cap`. Its
                level "sequence" is the geometric mean here.
    tis         min(w, 2) * min(r A, clip(r) A): truncated importance sampling.
                Ionides 2008, "Truncated importance sampling", JCGS 17(2), pages 295-311; for language models Yao et al.
                2025, "Your efficient RL framework secretly brings you off-policy RL training". Token: verl's documented
                threshold 2.0; sequence: SkyRL's `sequence_tis_ratio_clip_high` 5.0; geometric: verl 0.6.0,
                `rollout_is_level`, and AReaL's action "clamp" at level "sequence".
    icepop      M(w) * min(r A, clip(r) A), M(w) = w if least <= w <= most, else 0.
                Ring-1T, arXiv 2510.18855, section 2.3.2, eqs. 1 and 2 (0.5 and 5 for tokens: section 2.3.4). Sequence,
                the masked importance sampling of Liu et al. 2025, "When speed kills stability", weighs as TRL's
                `sequence_mask`, with the bounds 0.5 and 2 of SkyRL's `product_mask`; geometric weighs as AReaL's level
                "sequence", with the bounds 0.99 and 1.01 of SkyRL's `geo_mask`. SkyRL's own masks have no weight.
    trl         what TRL's GRPOTrainer does with use_vllm=True, by its own code and `vllm_importance_sampling_*`.
    none        ratio r, and no weight: stale rollouts count as fresh ones. Collapses when they are not.

The levels of w, with the ratios w_t of the n tokens that the loss counts:

    token       w_t for token t
    sequence    the product of all w_t, for every token (sequence importance sampling; TRL's sequence_* modes)
    geometric   (product of all w_t) ** (1 / n), for every token (GSPO, arXiv 2507.18071, section 4.1, eq. 7, has this
                ratio of pi and pi_old)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from async_grpo.errors import UsageError
from async_grpo.settings import TrainingSettings

TOKEN, SEQUENCE, GEOMETRIC = "token", "sequence", "geometric"

_BOUNDS = {  # of w, by correction and level; what is not here nobody has defined
    ("decoupled", TOKEN): (0.0, 5.0),
    ("decoupled", GEOMETRIC): (0.0, 5.0),
    ("tis", TOKEN): (0.0, 2.0),
    ("tis", SEQUENCE): (0.0, 5.0),
    ("tis", GEOMETRIC): (0.0, 2.0),
    ("icepop", TOKEN): (0.5, 5.0),
    ("icepop", SEQUENCE): (0.5, 2.0),
    ("icepop", GEOMETRIC): (0.99, 1.01),
}
_MASKING = ("decoupled", "icepop")
_NO_WEIGHT = {
    "bypass": "it has no weight: the ratio itself is against the sampler, and the GRPOConfig says how it is clipped "
    "(epsilon, epsilon_high) and at which level (importance_sampling_level)",
    "trl": "it is set in the GRPOConfig: vllm_importance_sampling_mode, vllm_importance_sampling_clip_min and _max",
    "none": "it has no weight",
}

_UNWEIGHED = {  # in words
    "bypass": "the ratio is clipped around the policy that sampled",
    "trl": "as TRL's use_vllm=True, by its own code",
    "none": "stale rollouts count as fresh ones",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A correction with everything that the command line left open filled in."""

    name: str
    level: str = TOKEN  # of the weight
    least: float = 0.0  # bounds of the weight
    most: float = inf
    masks: bool = False  # a weight outside becomes 0; otherwise the nearest bound

    @property
    def weighs(self) -> bool:
        """Whether the loss of each token is multiplied by a weight that is computed here."""
        return (self.name, self.level) in _BOUNDS

    def __str__(self) -> str:
        if not self.weighs:
            return f"{self.name}: {_UNWEIGHED[self.name]}"
        outside = "dropped" if self.masks else "limited"
        return f"{self.name}, {self.level} weights {outside} outside {self.least:g} to {self.most:g}"


def rule(name: str, level: str | None = None, least: float | None = None, most: float | None = None) -> Rule:
    """The correction `name` with these options, or its defaults where they are None.

    Raises:
        UsageError: nobody has defined this combination, or the bounds leave out the weight of a fresh rollout.
    """
    given = {"--correction-level": level, "--correction-min": least, "--correction-max": most}
    if name in _NO_WEIGHT:
        for flag, value in given.items():
            if value is not None:
                raise UsageError(f"{flag} does nothing with --correction {name}: {_NO_WEIGHT[name]}. Leave it out.")
        return Rule(name=name)
    level = level or TOKEN
    if (name, level) not in _BOUNDS:
        raise UsageError(
            f"--correction {name} --correction-level {level} has not been defined by anyone: the sequence level of "
            "AReaL's decoupled objective is the geometric mean of the token ratios. Take --correction-level "
            "geometric, or --correction icepop or tis for the product of the ratios."
        )
    default_least, default_most = _BOUNDS[name, level]
    chosen = Rule(
        name=name,
        level=level,
        least=default_least if least is None else least,
        most=default_most if most is None else most,
        masks=name in _MASKING,
    )
    if not 0 <= chosen.least <= 1 <= chosen.most or chosen.least == chosen.most:
        raise UsageError(
            f"--correction-min {chosen.least:g} and --correction-max {chosen.most:g}: the weight of a fresh rollout is "
            "1, so 0 <= min <= 1 <= max, and the two must differ."
        )
    return chosen


def rule_of(settings: TrainingSettings) -> Rule:
    """The correction that the command line asks for. Raises `UsageError` as `rule` does."""
    return rule(settings.correction, settings.correction_level, settings.correction_min, settings.correction_max)
