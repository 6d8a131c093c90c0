"""The reasoning state machine: what the answer is. Execution must not change it.

A policy is a generator. It asks for results, one request at a time, and is sent each; what it asks next, and the run
it returns, depend on the results alone. Whoever drives it may have computed a result long before it is asked for.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import islice, pairwise

from planner.graph import Op
from planner.workflow import VERIFIER, Policy, RoleName, Workflow


@dataclass(frozen=True)
class Step:
    """One step of reasoning, as a model wrote it."""

    text: str
    """Without the delimiter."""
    tokens: tuple[int, ...]
    """Token ids of the writer, the delimiter included."""
    source: RoleName
    ended: bool = False
    """The writer ended its text with this step."""


@dataclass(frozen=True, eq=False)
class Node:
    """A place in the reasoning tree: the step that led here and the place that it was written at.

    Two nodes are equal if their keys are: the same steps from the same root.
    """

    parent: Node | None
    step: Step | None
    """None at the root, whose `label` is the problem's key."""
    label: str = ""

    @cached_property
    def key(self) -> str:
        """16 hex digits that stand for the whole path."""
        if self.parent is None or self.step is None:
            return self.label
        text = "\x1f".join((self.parent.key, self.step.source, self.step.text, str(len(self.step.tokens))))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def depth(self) -> int:
        """Number of steps from the root."""
        return 0 if self.parent is None else self.parent.depth + 1

    @cached_property
    def path(self) -> tuple[Step, ...]:
        """The steps from the root to here."""
        return () if self.parent is None or self.step is None else (*self.parent.path, self.step)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of these steps."""
        return 0 if self.parent is None or self.step is None else self.parent.tokens + len(self.step.tokens)

    def lineage(self) -> Iterator[Node]:
        """This node, its parent, and so on up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def child(self, step: Step) -> Node:
        """The place after `step`, written here."""
        return Node(self, step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True)
class Request:
    """A result that is asked for. Writers are asked for the step after `node`, VERIFY for the score of its step."""

    op: Op
    node: Node
    role: RoleName
    attempt: int = 0
    """Counts the policy's alternatives at one place, never retries."""

    @property
    def name(self) -> str:
        """How trace and journal name it: `op:role:place:attempt`."""
        return f"{self.op}:{self.role}:{self.node.key}:{self.attempt}"

    def sampling_key(self, seed: int) -> int:
        """64-bit key from the seed, the problem and place (both in the node's key), the role and the attempt."""
        text = "\x1f".join((str(seed), self.node.key, self.role, str(self.attempt)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


Result = Step | float


def temperature(workflow: Workflow, request: Request) -> float:
    """At which temperature the step that is asked for is written."""
    if request.role is RoleName.DRAFT:
        return workflow.sampling.of_draft
    return workflow.policy.alternative_temperature if request.attempt else workflow.sampling.temperature


class Status(StrEnum):
    """Why a run ended."""

    ANSWER = "answer"
    REPEAT = "repeat"
    """A step came twice in a row."""
    ENDED = "ended"
    """The writer ended its text without an answer."""
    STEPS = "steps"
    TOKENS = "tokens"
    DEADLINE = "deadline"
    """Time was up: the committed steps are the beginning of what the run would have given."""
    ERROR = "error"
    """The problem could not be run: its prompt cannot be written in tokens, or is too long."""


class Event(StrEnum):
    """What became of a round."""

    ACCEPTED = "accepted"
    REFINED = "refined"
    KEPT_WEAK = "kept weak"
    """Refined, weak, and there was nowhere to go back to or the alternative was no better."""
    BACKTRACKED = "backtracked"


@dataclass(frozen=True)
class Decision:
    """One turn of the policy: the place that it moved to, and the scores that led there."""

    event: Event
    node: Node
    scores: Mapping[str, float]
    """Scores by what was scored: draft, refined, alternative."""
    went_back: int = 0
    """Steps that a backtrack gave up."""


@dataclass(frozen=True)
class Outcome:
    """How a run of the policy ended."""

    status: Status
    answer: str | None
    node: Node
    decisions: tuple[Decision, ...]


Reasoning = Generator[Request, Result, Outcome]
AnswerOf = Callable[[str], "str | None"]
"""The final answer in the text of a step, or None."""


def rounded(score: float) -> float:
    """A score as it meets a threshold; a tie accepts."""
    return round(float(score), 4)


class PolicyState:
    """What a policy remembers between its turns."""

    def __init__(self, workflow: Workflow, root: Node) -> None:
        """At the beginning of a run from `root`."""
        self.workflow = workflow
        self.place = root
        """Where the run stands."""
        self.written: defaultdict[str, list[str]] = defaultdict(list)
        """Texts that the target wrote, by the key of the place."""
        self.backtracks = 0
        self.decisions: list[Decision] = []
        self.first_end: Node | None = None
        """Where the first of several runs ended."""


def reason(
    workflow: Workflow,
    root: Node,
    answer_of: AnswerOf,
    on_decision: Callable[[Decision], None],
    state: PolicyState | None = None,
) -> Reasoning:
    """Run the workflow's policy from `root`, a node without a step whose label is the problem's key.

    `state` is the policy's memory, for a caller that wants to look ahead with `fallback`. With `vote` the problem is
    run several times, the first time as it would be alone; each further root has a label of its own, and so have
    its random keys.
    """
    state = state or PolicyState(workflow, root)
    outcomes: list[Outcome] = []
    for number in range(workflow.policy.vote):
        state.place = root if number == 0 else Node(None, None, f"{root.label}/{number}")
        state.backtracks = 0
        outcomes.append((yield from _run(state, answer_of, on_decision)))
        state.first_end = state.first_end or state.place
    return replace(_elected(outcomes), decisions=tuple(state.decisions))


def _run(state: PolicyState, answer_of: AnswerOf, on_decision: Callable[[Decision], None]) -> Reasoning:
    """One run from the place where the state stands."""
    workflow = state.workflow
    turn = {Policy.DRAFT_ONLY: _draft_only, Policy.TARGET_ONLY: _target_only}.get(workflow.policy.kind, _speculative)
    while True:
        decision = yield from turn(state, state.place)
        state.decisions.append(decision)
        state.place = node = decision.node
        on_decision(decision)
        over = ended(workflow, node, answer_of)
        if over is not None:
            answer = answer_of(node.step.text) if node.step else None
            return Outcome(over, answer, node, tuple(state.decisions))


def _elected(outcomes: list[Outcome]) -> Outcome:
    """The first of those with the answer that most give; a tie goes to the earliest, no answer counts for nothing."""
    votes = Counter(o.answer for o in outcomes if o.answer is not None)
    most = max(votes.values(), default=0)
    return next((o for o in outcomes if o.answer is not None and votes[o.answer] == most), outcomes[0])


Turn = Generator[Request, Result, Decision]


def _write(op: Op, node: Node, attempt: int = 0) -> Generator[Request, Result, Node]:
    step = yield Request(op, node, RoleName.DRAFT if op is Op.DRAFT else RoleName.TARGET, attempt)
    assert isinstance(step, Step), "a writer answers with a step"
    return node.child(step)


def _score(state: PolicyState, node: Node) -> Generator[Request, Result, float]:
    score = yield Request(Op.VERIFY, node, VERIFIER[state.workflow.policy.kind])
    assert not isinstance(score, Step), "a verifier answers with a score"
    return rounded(score)


def _draft_only(state: PolicyState, node: Node) -> Turn:
    drafted = yield from _write(Op.DRAFT, node)
    return Decision(Event.ACCEPTED, drafted, {})


def _target_only(state: PolicyState, node: Node) -> Turn:
    written = yield from _write(Op.REFINE, node)
    return Decision(Event.REFINED, written, {})


def _speculative(state: PolicyState, node: Node) -> Turn:
    """One round of `specreason`, `rsd` or `backtrack`: draft, verify, refine, and go back where even that is weak."""
    options = state.workflow.policy
    if node.depth < options.first_target_steps:
        return Decision(Event.REFINED, (yield from _refine(state, node)), {})
    drafted, score = yield from _best_draft(state, node)
    scores = {"draft": score}
    if score >= options.accept:
        return Decision(Event.ACCEPTED, drafted, scores)
    refined = yield from _refine(state, node)
    hopeless = options.kind is not Policy.BACKTRACK or not any(_open_ancestors(state, node))
    if hopeless and not options.score_refined:
        # Where nothing could follow from a score none is asked for.
        return Decision(Event.REFINED, refined, scores)
    scores["refined"] = yield from _score(state, refined)
    if hopeless or scores["refined"] >= options.accept_refined:
        return Decision(Event.REFINED, refined, scores)
    return (yield from _go_back(state, node, refined, scores))


def _best_draft(state: PolicyState, node: Node) -> Generator[Request, Result, tuple[Node, float]]:
    """All drafts of the step, then all their scores; the earliest of the best."""
    drafts: list[Node] = []
    for attempt in range(state.workflow.policy.drafts):
        drafts.append((yield from _write(Op.DRAFT, node, attempt)))
    scored: list[tuple[Node, float]] = []
    for drafted in dict.fromkeys(drafts):
        scored.append((drafted, (yield from _score(state, drafted))))
    return max(scored, key=lambda pair: pair[1])


def _refine(state: PolicyState, node: Node) -> Generator[Request, Result, Node]:
    refined = yield from _write(Op.REFINE, node)
    assert refined.step is not None, "a child has a step"
    state.written[node.key].append(refined.step.text)
    return refined


def _go_back(state: PolicyState, node: Node, refined: Node, scores: dict[str, float]) -> Turn:
    """Try the target's alternative to the nearest earlier step where it may still write."""
    for ancestor, replaced in _open_ancestors(state, node):
        before = state.written[ancestor.key]
        other = yield from _write(Op.BACKTRACK, ancestor, attempt=len(before))
        assert other.step is not None and replaced.step is not None, "a child has a step"
        same = other.step.text in (replaced.step.text, *before)
        before.append(other.step.text)
        if same:
            continue  # the same step again is no alternative
        state.backtracks += 1
        scores["alternative"] = yield from _score(state, other)
        if scores["alternative"] >= state.workflow.policy.accept_refined:
            return Decision(Event.BACKTRACKED, other, scores, went_back=node.depth - ancestor.depth)
        break
    return Decision(Event.KEPT_WEAK, refined, scores)


def fallback(state: PolicyState, node: Node) -> Request | None:
    """What the policy will ask for if the step that was refined at `node` turns out weak."""
    for ancestor, _ in _open_ancestors(state, node):
        return Request(Op.BACKTRACK, ancestor, RoleName.TARGET, len(state.written[ancestor.key]))
    return None


def _open_ancestors(state: PolicyState, node: Node) -> Iterator[tuple[Node, Node]]:
    """Earlier places, nearest first, where the target may still write, each with the node that it would replace."""
    options = state.workflow.policy
    if state.backtracks >= options.max_backtracks:
        return
    for replaced, ancestor in islice(pairwise(node.lineage()), options.max_ancestors):
        if len(state.written[ancestor.key]) <= options.resample_alternatives:
            yield ancestor, replaced


def ended(workflow: Workflow, node: Node, answer_of: AnswerOf) -> Status | None:
    """Why a run that commits `node` is over; None if it goes on."""
    step, previous = node.step, node.parent.step if node.parent else None
    if step is None:
        return None
    if answer_of(step.text) is not None:
        return Status.ANSWER
    if previous is not None and previous.text == step.text:
        return Status.REPEAT
    if step.ended:
        return Status.ENDED
    if node.depth >= workflow.budget.steps:
        return Status.STEPS
    if node.tokens >= workflow.budget.tokens:
        return Status.TOKENS
    return None
