"""The recipe of each model that ships: its shape, its data and its optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field

from models_jax.config import ModelConfig
from planner.problems.countdown import Countdown
from planner.problems.sums import Sums
from planner.problems.vocabulary import TOKENS


@dataclass(frozen=True)
class Recipe:
    """All that decides a training run."""

    name: str
    config: ModelConfig
    steps: int
    rows: int
    rate: float
    seed: int
    sums_share: float
    self_score_share: float = 0.0
    reward_weight: float = 0.0
    """Weight of the reward loss beside that of the next token."""
    traces: int = 0
    """Sampled traces that the reward model learns from."""
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
        reward_head=reward,
    )


RECIPES = {
    "draft": Recipe(
        "draft",
        _shape(48, 2, 128),
        steps=3200,
        rows=16,
        rate=5e-3,
        seed=1,
        sums_share=0.5,
        countdown=Countdown(least_right_share=0.0),
    ),
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
    "target": Recipe(
        "target",
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
    "prm": Recipe(
        "prm",
        _shape(48, 5, 128, reward=True),
        steps=3000,
        rows=16,
        rate=3e-3,
        seed=3,
        sums_share=0.4,
        reward_weight=2.0,
        traces=3_600,
        decay_share=0.6,
    ),
}
