"""Workflow: the roles and their models, the policy, sampling and budgets. What the user wants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.errors import UserError
from planner.yaml_file import Rule, content_hash, from_mapping, hold, read_yaml, to_mapping

LARGEST = 1_000_000
"""Largest count of tokens, steps or tries that a workflow may name."""
LARGEST_BLOCK = 256
"""Largest `row_block`."""
MOST_TRIES = 16
"""Most drafts of a step, further alternatives at a place and runs of a problem."""
LARGEST_SET = 16
"""Largest `tensor_parallel`."""


class Policy(StrEnum):
    """Which rule decides the answer; see `planner.policy`."""

    TARGET_ONLY = "target_only"
    DRAFT_ONLY = "draft_only"
    RSD = "rsd"
    BACKTRACK = "backtrack"
    SPECREASON = "specreason"


class RoleName(StrEnum):
    """The three roles of a workflow."""

    DRAFT = "draft"
    PRM = "prm"
    TARGET = "target"


class SelfScore(StrEnum):
    """How the target's verdict on a step is read from its next token after the score prompt."""

    EXPECTATION = "expectation"
    """The mean digit, by the ten digits' probabilities."""
    DIGIT = "digit"
    """The likeliest digit."""


class Arithmetic(StrEnum):
    """How a role's numbers are computed; a device must provide it to take the role."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """The integer model, W8A8: the same bits on every device that has it."""


class WeightKind(StrEnum):
    """How the matrices of a float role are held."""

    SAME = "same"
    """As the arithmetic has them."""
    INT8 = "int8"
    """Rounded to int8 with a scale for each output channel; products are still those of the arithmetic."""


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
    weights: WeightKind = WeightKind.SAME
    tensor_parallel: int = 1
    """Equal devices that each product is split over: a sum of parts rounds differently than a whole."""
    processor: str | None = None
    """Kind of processor for a float arithmetic, as the machine file calls it; None: the only one that it has."""


@dataclass(frozen=True)
class Speculate:
    """Token-level speculation within a role: a small model proposes tokens. It never changes tokens, only time."""

    model: str
    """The model that proposes, as in `Role`; it must have the role's tokenizer."""
    tokens: int = 4
    """Proposals that one pass of the role's model checks."""


@dataclass(frozen=True)
class Role:
    """One role: the model that plays it and its numerics class."""

    model: str
    """`zoo/NAME` for a model that ships, `hub/OWNER/NAME`, a GGUF file, or a folder in Hugging Face layout."""
    numerics: Numerics = field(default_factory=Numerics)
    speculate: Speculate | None = None
    """For a float role that writes."""


@dataclass(frozen=True)
class PolicyOptions:
    """The policy and its thresholds. Scores are probabilities, rounded to 4 digits; a tie accepts."""

    kind: Policy = Policy.BACKTRACK
    accept: float = 0.7
    accept_refined: float = 0.7
    max_backtracks: int = 5
    max_ancestors: int = 10
    score_refined: bool = False
    """Score the target's step also where nothing can follow from the score."""
    first_target_steps: int = 0
    """So many first steps are the target's, unscored."""
    drafts: int = 1
    """Drafts of each step, of which the one with the best score is kept."""
    resample_alternatives: int = 0
    """Further alternatives at a place where the target has written already, each sampled."""
    alternative_temperature: float = 0.7
    """Of those further alternatives."""
    vote: int = 1
    """Runs of each problem; the answer that most of them give is taken."""
    score_prompt: str = "?"
    """What `specreason` asks the target after a step; one digit, 0 to 9, answers it."""
    self_score: SelfScore = SelfScore.EXPECTATION

    def best(self, accept: float) -> float:
        """The share of steps of which a draft is accepted, where `accept` of single drafts are."""
        return 1.0 - (1.0 - accept) ** self.drafts

    def single(self, share: float) -> float:
        """The inverse: the share of single drafts, where of `share` of the steps one is accepted."""
        return share if self.drafts == 1 else 1.0 - (1.0 - share) ** (1.0 / self.drafts)


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; else argmax(logits / temperature + Gumbel(key, position)).

    The tokens to choose from are narrowed by top_k, then top_p, then min_p; integer models have none of these.
    """

    temperature: float = 0.0
    seed: int = 0
    draft_temperature: float | None = None
    """The draft's own; None: as above."""

    top_k: int = 0
    """Only so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this share together."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability."""

    @property
    def narrow(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def of_draft(self) -> float:
        """The draft's temperature."""
        return self.temperature if self.draft_temperature is None else self.draft_temperature


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
    """Share of drafted steps that the verifier accepts."""
    accept_refined: float = 0.7
    """Share of refined steps that the verifier accepts."""
    prompt_tokens: int = 24
    draft_step_tokens: int = 20
    target_step_tokens: int = 20
    steps: float = 4
    """Of a problem, on average."""
    draft_step_spread: float = 0.3
    """How much lengths of drafted steps differ: their standard deviation over their mean."""
    target_step_spread: float = 0.3
    steps_spread: float = 0.0
    """The same for the steps of a problem."""
    persistence: float = 0.0
    """How much rather a draft is accepted after an accepted step than after a refined one: the difference of the two
    shares. Hard stretches of a problem come together."""

    @property
    def step_bytes(self) -> int:
        """A step of the target on its way between devices: four bytes a token."""
        return 4 * self.target_step_tokens

    def accept_after(self, accepted: bool | None) -> float:
        """Share of drafts that are accepted after a step that was accepted, or refined; None: the first step."""
        if accepted is None:
            return self.accept
        return self.accept + self.persistence * (1 - self.accept if accepted else -self.accept)


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


def check(workflow: Workflow, where: str) -> None:
    """Raise UserError for the first value that no run could honour."""
    hold(_rules(workflow), where)
    for name in NEEDED_ROLES[workflow.policy.kind]:
        if name not in workflow.roles:
            what = f"roles.{name} is missing and policy {workflow.policy.kind} needs it"
            raise UserError(what, where=where, mend="add the role or choose another policy.kind")


NEEDED_ROLES = {
    Policy.TARGET_ONLY: (RoleName.TARGET,),
    Policy.DRAFT_ONLY: (RoleName.DRAFT,),
    Policy.RSD: tuple(RoleName),
    Policy.BACKTRACK: tuple(RoleName),
    Policy.SPECREASON: (RoleName.DRAFT, RoleName.TARGET),
}
"""The roles that each policy asks for."""

VERIFIER = {
    Policy.RSD: RoleName.PRM,
    Policy.BACKTRACK: RoleName.PRM,
    Policy.SPECREASON: RoleName.TARGET,
}
"""Who scores, for the policies that draft, score and refine."""


def _rules(workflow: Workflow) -> Iterator[Rule]:
    yield "name", workflow.name, right_name(workflow.name), "use one line of 1 to 80 characters"
    yield "problems", workflow.problems, bool(workflow.problems.strip()), "name a problem set, e.g. sums"
    for name, role in workflow.roles.items():
        yield from _role_rules(f"roles.{name}", role, workflow.budget)
        yield from _speculate_rules(name, role)
    policy, sampling, statistics = workflow.policy, workflow.sampling, workflow.statistics
    yield from _share("policy", policy, "accept", "accept_refined")
    yield from _whole("policy", policy, 0, LARGEST, "max_backtracks", "max_ancestors", "first_target_steps")
    yield from _whole("policy", policy, 1, MOST_TRIES, "drafts", "vote")
    yield from _whole("policy", policy, 0, MOST_TRIES, "resample_alternatives")
    yield "policy.score_prompt", policy.score_prompt, bool(policy.score_prompt), "write what asks for a digit, e.g. ?"
    right = 0 < policy.alternative_temperature <= 5
    mend = "use a number above 0, to 5: a greedy alternative would be the same step again"
    yield "policy.alternative_temperature", policy.alternative_temperature, right, mend
    yield from _temperature_rules(policy, sampling)
    yield from _whole("sampling", sampling, 0, 2**63 - 1, "seed")
    yield from _whole("sampling", sampling, 0, LARGEST, "top_k")
    yield "sampling.top_p", sampling.top_p, 0 < sampling.top_p <= 1, "use a number above 0, up to 1 (all tokens)"
    yield from _share("sampling", sampling, "min_p")
    for name, role in workflow.roles.items():
        right = role.numerics.arithmetic is not Arithmetic.INT8 or not sampling.narrow
        mend = "take top_k, top_p and min_p out of sampling, which integer models do not have, or use a float role"
        yield f"roles.{name}.numerics.arithmetic", role.numerics.arithmetic.value, right, mend
    yield from _whole("budget", workflow.budget, 1, LARGEST, "steps", "tokens", "step_tokens")
    yield from _share("statistics", statistics, "accept", "accept_refined")
    lengths = ("prompt_tokens", "draft_step_tokens", "target_step_tokens")
    yield from _whole("statistics", statistics, 1, LARGEST, *lengths)
    steps = statistics.steps
    yield "statistics.steps", steps, 1 <= steps <= LARGEST, f"use a number from 1 to {LARGEST}"
    yield from _share("statistics", statistics, "persistence")
    for name in ("draft_step_spread", "target_step_spread", "steps_spread"):
        value = getattr(statistics, name)
        yield f"statistics.{name}", value, 0 <= value <= 5, "use a number from 0 to 5"


def _temperature_rules(policy: PolicyOptions, sampling: Sampling) -> Iterator[Rule]:
    yield (
        "sampling.temperature",
        sampling.temperature,
        0 <= sampling.temperature <= 5,
        "use a number from 0 (greedy) to 5",
    )
    right = 0 <= sampling.of_draft <= 5
    mend = "use a number from 0 (greedy) to 5, or leave the key out"
    yield "sampling.draft_temperature", sampling.draft_temperature, right, mend
    drafted = policy.kind in VERIFIER or policy.kind is Policy.DRAFT_ONLY
    sampled = drafted and sampling.of_draft > 0
    mend = "set sampling.draft_temperature above 0, or use 1: greedy drafts of a step are all the same"
    yield "policy.drafts", policy.drafts, policy.drafts == 1 or policy.kind not in VERIFIER or sampled, mend
    sampled = sampled or (sampling.temperature > 0 and policy.kind is not Policy.DRAFT_ONLY)
    mend = "set a temperature in sampling above 0, or use 1: greedy runs of a problem are all the same"
    yield "policy.vote", policy.vote, policy.vote == 1 or sampled, mend


def _role_rules(key: str, role: Role, budget: Budget) -> Iterator[Rule]:
    yield f"{key}.model", role.model, bool(role.model.strip()), "name a model, e.g. zoo/draft, or a folder"
    numerics, key = role.numerics, f"{key}.numerics"
    yield from _whole(key, numerics, 1, LARGEST_BLOCK, "row_block")
    yield from _whole(key, numerics, 1, LARGEST_SET, "tensor_parallel")
    rows, slots = numerics.row_block, numerics.cache_tokens
    yield from _whole(key, numerics, 1, LARGEST, "cache_tokens")
    mend = f"use a multiple of row_block, which is {rows}"
    yield f"{key}.cache_tokens", slots, rows < 1 or slots % rows == 0, mend
    mend = f"use at least {budget.tokens} (budget.tokens), and more for the prompt, or lower the budget"
    yield f"{key}.cache_tokens", slots, slots >= budget.tokens, mend
    most = 1 if numerics.arithmetic is Arithmetic.INT8 else 64
    right, mend = 1 <= numerics.tensor_parallel <= most, f"use a whole number from 1 to {most}"
    yield f"{key}.tensor_parallel", numerics.tensor_parallel, right, mend
    right = numerics.weights == WeightKind.SAME or numerics.arithmetic != Arithmetic.INT8
    mend = "leave the key out: the weights of the integer model are int8 already"
    yield f"{key}.weights", numerics.weights, right, mend
    processor = numerics.processor
    right = processor is None or right_name(processor)
    yield f"{key}.processor", processor, right, "name a processor of the machine file or leave the key out"


def _speculate_rules(name: RoleName, role: Role) -> Iterator[Rule]:
    speculate, key = role.speculate, f"roles.{name}.speculate"
    if speculate is None:
        return
    right = name != RoleName.PRM and role.numerics.arithmetic is not Arithmetic.INT8
    yield key, speculate.model, right, "take it out: only a float role that writes speculates"
    yield f"{key}.model", speculate.model, bool(speculate.model.strip()), "name a model, or a folder"
    most = role.numerics.row_block - 1
    mend = f"use a whole number from 1 to {most}, which is below numerics.row_block"
    yield f"{key}.tokens", speculate.tokens, 1 <= speculate.tokens <= most, mend


def right_name(name: str) -> bool:
    """Whether a name can stand in a line of a report."""
    return bool(name.strip()) and len(name) <= 80 and name.isprintable()


def _share(section: str, of: object, *fields: str) -> Iterator[Rule]:
    for name in fields:
        value = getattr(of, name)
        yield f"{section}.{name}", value, 0 <= value <= 1, "use a number from 0 to 1"


def _whole(section: str, of: object, least: int, most: int, *fields: str) -> Iterator[Rule]:
    for name in fields:
        value = getattr(of, name)
        yield f"{section}.{name}", value, least <= value <= most, f"use a whole number from {least} to {most}"
