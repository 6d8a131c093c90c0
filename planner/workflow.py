"""Workflow: the roles and their models, the policy, sampling and budgets. What the user wants."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.yaml_file import content_hash, from_mapping, read_yaml, to_mapping


class Policy(StrEnum):
    """Which rule decides the answer; see `planner.policy`."""

    TARGET_ONLY = "target_only"
    DRAFT_ONLY = "draft_only"
    RSD = "rsd"
    BACKTRACK = "backtrack"


class RoleName(StrEnum):
    """The three roles of a workflow."""

    DRAFT = "draft"
    PRM = "prm"
    TARGET = "target"


class Arithmetic(StrEnum):
    """How a role's numbers are computed; a device must provide it to take the role."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """The integer model, W8A8: the same bits on every device that has it."""


@dataclass(frozen=True)
class Numerics:
    """The numerics class of a role: two placements within one class give the same tokens.

    The bits of a float product depend on the shape of the block that it is computed in, so every forward pass of
    a role runs in blocks of `row_block` tokens against a cache of `cache_tokens` slots, padded. The integer
    arithmetic is exact and does not depend on either.
    """

    arithmetic: Arithmetic = Arithmetic.FLOAT32
    row_block: int = 8
    cache_tokens: int = 256


@dataclass(frozen=True)
class Role:
    """One role: the model that plays it and its numerics class."""

    model: str
    """`zoo/NAME` for a model that ships, else a folder in Hugging Face layout."""
    numerics: Numerics = field(default_factory=Numerics)


@dataclass(frozen=True)
class PolicyOptions:
    """The policy and its thresholds. Scores are probabilities, rounded to 4 digits; a tie accepts."""

    kind: Policy = Policy.BACKTRACK
    accept: float = 0.7
    accept_refined: float = 0.7
    max_backtracks: int = 5
    max_ancestors: int = 10


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; else argmax(logits / temperature + Gumbel(key, position))."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Budget:
    """Limits a problem: committed steps, committed tokens, tokens in one step."""

    steps: int = 16
    tokens: int = 200
    step_tokens: int = 48


@dataclass(frozen=True)
class Statistics:
    """What the planner expects of a run; `heteroreason run` prints what happened beside it."""

    accept: float = 0.8
    """Share of drafted steps that the PRM accepts."""
    accept_refined: float = 0.7
    """Share of refined steps that the PRM accepts."""
    prompt_tokens: int = 24
    draft_step_tokens: int = 20
    target_step_tokens: int = 20
    steps: int = 4


@dataclass(frozen=True)
class Workflow:
    """The whole of it. Two workflows with the same `hash` ask for the same answers."""

    name: str
    problems: str
    """Name of the problem set: `sums`, `countdown` or `text`."""
    roles: dict[RoleName, Role]
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    statistics: Statistics = field(default_factory=Statistics)

    @classmethod
    def load(cls, path: str | Path) -> Workflow:
        """Read a YAML file. Raises UserError that names file, key, value and mend."""
        return cls.from_mapping(read_yaml(path), where=str(path))

    @classmethod
    def from_mapping(cls, raw: Any, where: str) -> Workflow:
        """Check a mapping read from a file called `where`."""
        workflow = from_mapping(cls, raw, where)
        check(workflow, where)
        return workflow

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, the inverse of `from_mapping`."""
        return to_mapping(self)

    @property
    def hash(self) -> str:
        """Hash of the content."""
        return content_hash(self.to_mapping())
