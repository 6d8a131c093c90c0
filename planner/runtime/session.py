"""One problem in the engine: its policy, the results so far, and what each cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from planner.dispatch import Situation, Start
from planner.errors import UserError
from planner.graph import Op
from planner.machine import transfer_us
from planner.plan import Plan
from planner.policy import (
    Decision,
    Node,
    Outcome,
    PolicyState,
    Request,
    Result,
    Status,
    Step,
    ended,
    fallback,
    reason,
    rounded,
    temperature,
)
from planner.problems.base import Problem, ProblemSet
from planner.runtime.backend import ModelInfo, Output, Work
from planner.runtime.worker import Done
from planner.schedule.instance import TOKEN_BYTES
from planner.trace import Chunk, Decided, Event, ProblemEnded, ProblemStarted
from planner.workflow import VERIFIER, RoleName, SelfScore


class Journal(Protocol):
    """What a run notes so that another can go on from there."""

    def results(self, label: str) -> Mapping[str, Result]:
        """What the policy of a problem was given so far, by the name of the request."""
        ...

    def result(self, label: str, request: str, result: Result) -> None:
        """The policy is about to go on with a result."""
        ...

    def end(self, solved: Solved) -> None:
        """A problem is over."""
        ...

    def ended(self, label: str) -> bool:
        """Whether a problem was over in an earlier run."""
        ...


class Host(Protocol):
    """What a session needs of the engine that it runs in."""

    problems: ProblemSet
    journal: Journal | None

    @property
    def plan(self) -> Plan:
        """The plan that is followed now."""
        ...

    @property
    def models(self) -> Mapping[RoleName, ModelInfo]:
        """What is known of each role's model."""
        ...

    def sink(self, event: Event, /) -> None:
        """Put an event into the trace."""
        ...

    def encode(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a text for a role."""
        ...

    def encode_prompt(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a prompt for a role."""
        ...

    def decode(self, role: RoleName, tokens: tuple[int, ...]) -> str:
        """Text of a role's token ids."""
        ...

    def now_us(self) -> int:
        """The time now."""
        ...


@dataclass(frozen=True)
class Solved:
    """What a run gave for one problem."""

    problem: Problem
    outcome: Outcome
    steps: tuple[str, ...]
    """The committed steps as people read them."""
    answer: str | None
    correct: bool
    latency_us: int
    """From its arrival to its answer."""
    label: str = ""
    """Its name in trace and journal."""
    error: UserError | None = None
    """Why it could not be run at all; its status is `error` then."""


@dataclass
class Session:
    """One problem, from its admission to its end."""

    host: Host
    problem: Problem
    label: str
    """Names the problem in the trace: its key, and a number where the same problem comes again."""
    slot: str
    """Names the sequences that its caches are kept in."""
    arrived_us: int
    deadline_us: int | None = None
    known: dict[Request, Result] = field(default_factory=dict)
    partial: dict[Request, list[int]] = field(default_factory=dict)
    """Tokens of steps that are begun."""
    held: dict[RoleName, list[int]] = field(default_factory=dict)
    """The tokens in each role's cache."""
    asked: list[Request] = field(default_factory=list)
    """What the policy asked for, in order: the work that counted."""
    synced: list[Request] = field(default_factory=list)
    """SYNC that ran: it follows what the policy waits for, so it counted too."""
    writers: dict[str, Request] = field(default_factory=dict)
    """Key of a committed place -> the request that wrote the step there."""
    outcome: Outcome | None = None
    end_us: int = 0

    def __post_init__(self) -> None:
        plan, problems = self.host.plan, self.host.problems
        text = problems.prompt(self.problem)
        self.prompt = {role: self.host.encode_prompt(role, text) for role in plan.roles}
        self.score_prompt = self._score_prompt()
        self._check_room()
        self.base = Node(None, None, self.problem.key)
        self.memory = PolicyState(plan.workflow, self.base)
        self.policy = reason(plan.workflow, self.base, problems.answer, self._decided, self.memory)

    def begin(self) -> None:
        """Start the policy, and go on with it as far as the journal of an earlier run has results."""
        now = self.host.now_us()
        self.host.sink(ProblemStarted(self.label, self.problem.question, now, self.arrived_us))
        self.recorded = dict(self.host.journal.results(self.label)) if self.host.journal else {}
        """What an earlier run of the problem had been given, by the name of the request."""
        self.need = next(self.policy)
        self.asked.append(self.need)
        self.advance()

    def _score_prompt(self) -> tuple[int, ...]:
        """The tokens that ask the target for a digit, with the policy that has it score."""
        policy = self.host.plan.workflow.policy
        judges = VERIFIER.get(policy.kind) is RoleName.TARGET
        return self.host.encode(RoleName.TARGET, policy.score_prompt) if judges else ()

    # --- decide ---

    def advance(self) -> None:
        """Send the policy every result that it asks for and that is there."""
        try:
            while self.outcome is None and self._settled(self.need):
                self.need = self.policy.send(self._noted(self.need))
                self.base = self.memory.place
                self.asked.append(self.need)
        except StopIteration as stop:
            self.outcome, self.end_us = stop.value, self.host.now_us()

    def expire(self, now_us: int) -> None:
        """End with what is committed if the deadline is over."""
        if self.outcome is None and self.deadline_us is not None and now_us >= self.deadline_us:
            decisions = tuple(self.memory.decisions)
            self.outcome, self.end_us = Outcome(Status.DEADLINE, None, self.base, decisions), now_us

    def _noted(self, request: Request) -> Result:
        """A result that the policy goes on with, once it is in the journal."""
        result, name = self.known[request], request.name
        if self.recorded.pop(name, None) is None and self.host.journal is not None:
            self.host.journal.result(self.label, name, result)
        return result

    def _settled(self, request: Request) -> bool:
        """Whether the result is there. An alternative is what the target would have written at its place before."""
        if self.recorded and request.name in self.recorded:
            self.known[request] = self.recorded[request.name]
        twin = _twin(request)
        if request not in self.known and twin in self.known:
            self.known[request] = self.known[twin]
        return request in self.known

    def _decided(self, decision: Decision) -> None:
        self.base = decision.node
        step = decision.node.step
        assert step is not None, "a decision moves to a step"
        wrote = (r for r in reversed(self.asked) if r.node == self.base.parent and self.known.get(r) == step)
        self.writers[self.base.key] = next(wrote)
        self.host.sink(
            Decided(
                self.label,
                self.host.now_us(),
                decision.event.value,
                decision.node.depth,
                step.source.value,
                self.host.problems.readable(step.text),
                dict(decision.scores),
                decision.went_back,
            )
        )

    # --- dispatch ---

    def situation(self) -> Situation:
        """Where the problem stands, for `dispatch`."""
        plan = self.host.plan
        return Situation(
            self.need,
            self.base,
            self.known,
            self._ends,
            {role for role in plan.roles if role not in self.held},
            fallback(self.memory, self.base) if plan.alternatives else None,
            tuple(self._streams()) if plan.shadow_sync else (),
        )

    def work(self, start: Start) -> Work:
        """The next chunk of a request: what the cache lacks, then up to a chunk of new tokens."""
        plan, request = self.host.plan, start.request
        role = request.role
        last = max((request, *start.also), key=lambda r: r.node.depth)
        begun = self._begun(request)
        wanted = [*self._tokens(role, last.node), *begun]
        held = self.held.setdefault(role, [])
        keep = _common_prefix(held, wanted)
        feed = tuple(wanted[keep:])
        self.held[role] = wanted
        common = {"role": role.value, "sequence": self.slot, "keep": keep, "feed": feed}
        if request.op is Op.VERIFY:
            ends = (len(self._tokens(role, r.node)) - 1 for r in (request, *start.also))
            return Work(**common, score=tuple(ends), **self._question(role))
        if request.op is Op.SYNC:
            self.synced.append(request)
        if request.op in (Op.PREFILL, Op.SYNC):
            return Work(**common)
        sampling = plan.workflow.sampling
        return Work(
            **common,
            max_new=min(plan.chunk_tokens, self._step_limit(request.node) - len(begun)),
            key=request.sampling_key(sampling.seed),
            temperature=temperature(plan.workflow, request),
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            begun=len(begun),
        )

    def _question(self, role: RoleName) -> dict[str, Any]:
        """What a role that writes, too, is asked for when it scores; a reward model is asked nothing."""
        if role is RoleName.PRM:
            return {}
        expectation = self.host.plan.workflow.policy.self_score is SelfScore.EXPECTATION
        return {"ask": self.score_prompt, "expectation": expectation}

    def delay_us(self, device: str, start: Start) -> int:
        """Until the tokens, and the verdict, that a piece of work depends on have reached its device."""
        plan, request = self.host.plan, start.request
        sources = set()
        if request.node.step is not None:
            sources.add(plan.placement[request.node.step.source])
        verifier = VERIFIER.get(plan.workflow.policy.kind)
        if request.op in (Op.REFINE, Op.BACKTRACK) and not start.speculative and verifier is not None:
            sources.add(plan.placement[verifier])
        if request in self.partial or request.op in (Op.PREFILL, Op.SYNC):
            return 0
        payload = plan.workflow.statistics.target_step_tokens * TOKEN_BYTES
        return max((transfer_us(plan.machine, source, device, payload) for source in sources), default=0)

    def _begun(self, request: Request) -> list[int]:
        """The tokens of a step that is being written; SYNC reads those of the step that the policy waits for."""
        if request.op is Op.SYNC:
            return self._begun(self.need)
        if request not in self.partial and _twin(request) in self.partial:
            self.partial[request] = self.partial.pop(_twin(request))
        return self.partial.get(request, [])

    def _streams(self) -> Iterator[Request]:
        """SYNC for each role that can read on in the step that the target is writing."""
        if self.need.op not in (Op.REFINE, Op.BACKTRACK):
            return
        begun, models = self._begun(self.need), self.host.models
        for role in (RoleName.DRAFT, RoleName.PRM):
            same = role in models and models[role].tokenizer_hash == models[self.need.role].tokenizer_hash
            if same and self.held.get(role) != [*self._tokens(role, self.need.node), *begun]:
                yield Request(Op.SYNC, self.need.node, role, len(begun))

    def _step_limit(self, node: Node) -> int:
        """Most tokens of the step after `node`."""
        budget = self.host.plan.workflow.budget
        return min(budget.step_tokens, budget.tokens - sum(len(s.tokens) for s in node.path))

    def _tokens(self, role: RoleName, node: Node) -> list[int]:
        """The prompt and the steps up to `node` in the tokens of a role."""
        tokens = list(self.prompt[role])
        for step in node.path:
            tokens += self._step_tokens(role, step)
        return tokens

    def _step_tokens(self, role: RoleName, step: Step) -> tuple[int, ...]:
        models = self.host.models
        if models[role].tokenizer_hash == models[step.source].tokenizer_hash:
            return step.tokens
        return self.host.encode(role, step.text + self.host.problems.delimiter)

    def _ends(self, node: Node) -> bool:
        return ended(self.host.plan.workflow, node, self.host.problems.answer) is not None

    # --- commit ---

    def forget(self, roles: Iterable[RoleName]) -> None:
        """The caches of these roles are lost: what they need is read again from the first token on."""
        for role in roles:
            self.held.pop(role, None)

    def commit(self, start: Start, output: Output) -> None:
        """Take in a chunk that is over and let the policy go on as far as it can."""
        request = start.request
        if request.op is Op.VERIFY:
            requests = (request, *start.also)
            for asked, score in zip(requests, output.scores, strict=True):
                self.known[asked] = rounded(score)
        elif request.op not in (Op.PREFILL, Op.SYNC):
            self._written(request, output)
        self.held[request.role] += output.tokens
        self.advance()

    def _written(self, request: Request, output: Output) -> None:
        """Add a chunk to the step that it belongs to; a step that is whole becomes a result."""
        begun = [*self.partial.get(request, ()), *output.tokens]
        if not (output.complete or output.ended or len(begun) >= self._step_limit(request.node)):
            self.partial[request] = begun
            return
        # If the device fails here nothing has changed, and the chunk is worked out again.
        text = self.host.decode(request.role, tuple(begun))
        text, _, _ = text.partition(self.host.problems.delimiter)
        self.known[request] = Step(text, tuple(begun), request.role, output.ended)
        self.partial.pop(request, None)

    def record(self, start: Start, work: Work, done: Done) -> None:
        """Put a chunk that is over into the trace."""
        request = start.request
        self.host.sink(
            Chunk(
                self.label,
                done.device,
                request.role,
                request.op,
                start.round,
                request.name,
                done.start_us,
                done.end_us,
                len(work.feed),
                len(done.output.tokens),
                work.keep,
                start.speculative,
                done.output.cycles,
            )
        )

    def close(self) -> Solved:
        """Put the end into the trace, once nothing runs for the problem any more, and give its result."""
        assert self.outcome is not None, "a session closes after its policy"
        prefill = [Request(Op.PREFILL, Node(None, None, self.problem.key), r) for r in self.prompt]
        used = [*prefill, *self.synced, *self.asked, *map(_twin, self.asked)]
        path = [self.writers[node.key] for node in self.outcome.node.lineage() if node.step is not None]
        solved = self._solved(self.outcome)
        if self.host.journal is not None:
            self.host.journal.end(solved)
        self.host.sink(
            ProblemEnded(
                self.label,
                self.end_us,
                self.outcome.status,
                solved.answer,
                solved.correct,
                solved.steps,
                tuple(dict.fromkeys(r.name for r in used)),
                tuple(dict.fromkeys(r.name for r in [*path, *map(_twin, path)])),
            )
        )
        return solved

    def _solved(self, outcome: Outcome) -> Solved:
        problems, texts = self.host.problems, [s.text for s in outcome.node.path]
        steps = tuple(map(problems.readable, texts))
        correct = problems.grade(self.problem, texts)
        took_us = self.end_us - self.arrived_us
        return Solved(self.problem, outcome, steps, outcome.answer, correct, took_us, self.label)

    def _check_room(self) -> None:
        budget = self.host.plan.workflow.budget
        for role, prompt in self.prompt.items():
            room = self.host.models[role].context_tokens - len(self.score_prompt) * (role is RoleName.TARGET)
            if not prompt:
                raise UserError("the prompt is empty", where=f"problem {self.problem.key}", mend="write a question")
            if len(prompt) + budget.tokens > room:
                raise UserError(
                    f"prompt and budget need {len(prompt) + budget.tokens} tokens and role {role} holds {room}",
                    where=f"workflow {self.host.plan.workflow.name}",
                    mend="raise numerics.cache_tokens or lower budget.tokens",
                )


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists begin alike; by bisection, for lists compare fast."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _twin(request: Request) -> Request:
    """The same step by another name: an alternative after an ancestor is what the target would write there first."""
    return replace(request, op=Op.REFINE) if request.op is Op.BACKTRACK else request
