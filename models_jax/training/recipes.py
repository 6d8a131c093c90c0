"""The recipe of each model that ships: its shape, its data and its optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from models_jax.config import ModelConfig, RewardHead
from planner.problems.countdown import Countdown
from planner.problems.sums import Sums
from planner.problems.vocabulary import TOKENS


@dataclass(frozen=True)
class Recipe:
    """All that decides a training run."""

    name: str
    config: ModelConfig
    steps: int
    """What the rate's schedule is made for."""
    rows: int
    rate: float
    seed: int
    sums_share: float
    self_score_share: float = 0.0
    reward_weight: float = 0.0
    """Weight of the reward loss beside that of the next token."""
    traces: int = 0
    """Sampled traces that the reward model learns from."""
    trace_share: float = 0.25
    corrupt_share: float = 0.45
    """Share of its texts that are such traces, and that hold a made-up mistake; the others are right."""
    stop: int = 0
    """Stop at this step instead; 0 goes to the end."""
    warm_up: int = 100
    decay_share: float = 0.4
    sums: Sums = field(default_factory=lambda: Sums(fewest_terms=2))
    countdown: Countdown = field(default_factory=Countdown)
    """What the problems are drawn from."""
    after: str = ""
    """The recipe whose weights this one goes on from."""

    @property
    def sets(self) -> dict[str, Sums | Countdown]:
        """The problem sets by name."""
        return {"sums": self.sums, "countdown": self.countdown}


def _shape(hidden: int, layers: int, inner: int, head: int = 16, reward: bool = False) -> ModelConfig:
    heads = hidden // head
    return ModelConfig(
        model_type="llama",
        vocab_size=len(TOKENS),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head,
        max_position_embeddings=256,
        reward_head=RewardHead.TWO_CLASS if reward else None,
    )


_WRITER = Recipe(
    "writer",
    _shape(48, 2, 128),
    steps=3200,
    rows=16,
    rate=5e-3,
    seed=1,
    sums_share=0.5,
    countdown=Countdown(least_right_share=0.0),
)
"""The draft is stopped early, to be weaker than the target; the reward model begins with the whole run."""

RECIPES = {
    "draft": replace(_WRITER, name="draft", stop=2400),
    "prm_writer": replace(_WRITER, name="prm_writer"),
    "target_first": Recipe(
        "target_first",
        _shape(128, 4, 352, head=32),
        steps=5000,
        rows=8,
        rate=2e-3,
        seed=2,
        sums_share=0.4,
        self_score_share=0.06,
        sums=Sums(fewest_terms=3),
        countdown=Countdown(highest_number=12, three_share=0.5, least_right_share=0.0),
    ),
    "target_second": Recipe(
        "target_second",
        _shape(128, 4, 352, head=32),
        steps=4000,
        rows=8,
        rate=1.5e-3,
        seed=12,
        sums_share=0.35,
        self_score_share=0.06,
        decay_share=0.6,
        countdown=Countdown(least_right_share=0.0),
        after="target_first",
    ),
    "target_third": Recipe(
        "target_third",
        _shape(128, 4, 352, head=32),
        steps=2400,
        rows=8,
        rate=1.2e-3,
        seed=13,
        sums_share=0.25,
        self_score_share=0.06,
        decay_share=0.8,
        countdown=Countdown(three_share=0.6),
        after="target_second",
    ),
    "target_fourth": Recipe(
        "target_fourth",
        _shape(128, 4, 352, head=32),
        steps=2600,
        rows=8,
        rate=8e-4,
        seed=14,
        sums_share=0.25,
        self_score_share=0.4,
        decay_share=0.8,
        countdown=Countdown(three_share=0.6),
        after="target_third",
    ),
    "target": Recipe(
        "target",
        _shape(128, 4, 352, head=32),
        steps=2700,
        rows=8,
        rate=1e-3,
        seed=15,
        sums_share=0.25,
        self_score_share=0.65,
        decay_share=0.8,
        countdown=Countdown(three_share=0.6),
        after="target_fourth",
    ),
    "prm_first": Recipe(
        "prm_first",
        _shape(128, 4, 256, reward=True),
        steps=1600,
        rows=8,
        rate=1.5e-3,
        seed=3,
        sums_share=0.4,
        reward_weight=2.0,
        traces=3_600,
        decay_share=0.6,
        after="prm_writer",
    ),
    "prm_second": Recipe(
        "prm_second",
        _shape(128, 4, 256, reward=True),
        steps=2400,
        rows=8,
        rate=1e-3,
        seed=4,
        sums_share=0.35,
        reward_weight=2.0,
        traces=6_000,
        trace_share=0.35,
        corrupt_share=0.35,
        decay_share=0.7,
        after="prm_first",
    ),
    "prm_third": Recipe(
        "prm_third",
        _shape(128, 4, 256, reward=True),
        steps=3000,
        rows=8,
        rate=8e-4,
        seed=5,
        sums_share=0.15,
        reward_weight=2.0,
        traces=24_000,
        trace_share=0.55,
        corrupt_share=0.3,
        decay_share=0.8,
        after="prm_second",
    ),
    "prm": Recipe(
        "prm",
        _shape(128, 4, 256, reward=True),
        steps=2000,
        rows=8,
        rate=1e-3,
        seed=6,
        sums_share=0.15,
        reward_weight=2.0,
        traces=12_000,
        trace_share=0.35,
        corrupt_share=0.5,
        decay_share=0.8,
        after="prm_third",
    ),
}
