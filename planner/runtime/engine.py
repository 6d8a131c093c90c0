"""The engine: decide what the policy needs, dispatch what the plan allows, commit what came back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from planner.dispatch import Situation, Start, dispatch
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
    Step,
    ended,
    fallback,
    reason,
    rounded,
)
from planner.problems.base import Problem, ProblemSet
from planner.runtime.backend import ModelInfo, Output, Work
from planner.runtime.worker import Done, Workers
from planner.schedule.instance import TOKEN_BYTES
from planner.trace import Chunk, Decided, ProblemEnded, ProblemStarted, RunStarted, Sink
from planner.workflow import RoleName

CHUNK_TIMEOUT_S = 120.0
"""Longest wait for a chunk."""


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


@dataclass
class _Running:
    start: Start
    work: Work


class Engine:
    """Runs problems by a plan, one after another. Workers and trace are the caller's to close."""

    def __init__(self, plan: Plan, workers: Workers, problems: ProblemSet, sink: Sink) -> None:
        """Load every role on its device. Raises UserError for a model or device that cannot do it."""
        self.plan, self.workers, self.problems, self.sink = plan, workers, problems, sink
        roles = plan.workflow.roles
        placed = {name: (plan.placement[name], roles[name]) for name in plan.roles}
        self.models: Mapping[RoleName, ModelInfo] = workers.load(placed, problems.delimiter)
        sink(RunStarted(plan.hash, plan.name, workers.clock))

    def solve(self, problem: Problem) -> Solved:
        """Run the policy on one problem to its end."""
        session = _Session(self, problem)
        while session.outcome is None:
            session.dispatch()
            session.commit(self.workers.wait(CHUNK_TIMEOUT_S))
        session.finish()
        return session.solved()


@dataclass
class _Session:
    """One problem in the engine: the policy, the results so far, and what each cache holds."""

    engine: Engine
    problem: Problem
    known: dict[Request, Result] = field(default_factory=dict)
    partial: dict[Request, list[int]] = field(default_factory=dict)
    """Tokens of steps that are begun."""
    running: dict[str, _Running] = field(default_factory=dict)
    """What each device is busy with."""
    held: dict[RoleName, list[int]] = field(default_factory=dict)
    """The tokens in each role's cache."""
    asked: list[Request] = field(default_factory=list)
    """What the policy asked for, in order: the work that counted."""
    synced: list[Request] = field(default_factory=list)
    """SYNC that ran: it follows what the policy waits for, so it counted too."""
    outcome: Outcome | None = None
    end_us: int = 0

    def __post_init__(self) -> None:
        plan, problems = self.engine.plan, self.engine.problems
        prompt = problems.prompt(self.problem)
        self.prompt = {r: self.engine.workers.encode(plan.placement[r], r, prompt) for r in plan.roles}
        self._check_room()
        self.base = Node(None, None, self.problem.key)
        self.memory = PolicyState(plan.workflow)
        self.policy = reason(plan.workflow, self.base, problems.answer, self._decided, self.memory)
        self.start_us = self.engine.workers.now_us()
        self.engine.sink(ProblemStarted(self.problem.key, self.problem.question, self.start_us))
        self.need = next(self.policy)
        self.asked.append(self.need)

    # --- decide ---

    def _advance(self) -> None:
        """Send the policy every result that it asks for and that is there."""
        try:
            while self._settled(self.need):
                self.need = self.policy.send(self.known[self.need])
                self.asked.append(self.need)
        except StopIteration as stop:
            self.outcome, self.end_us = stop.value, self.engine.workers.now_us()

    def _settled(self, request: Request) -> bool:
        """Whether the result is there. An alternative is what the target would have written at its place before."""
        twin = _twin(request)
        if request not in self.known and twin in self.known:
            self.known[request] = self.known[twin]
        return request in self.known

    def _decided(self, decision: Decision) -> None:
        self.base = decision.node
        step = decision.node.step
        assert step is not None, "a decision moves to a step"
        readable = self.engine.problems.readable(step.text)
        now = self.engine.workers.now_us()
        self.engine.sink(
            Decided(
                self.problem.key,
                now,
                decision.event.value,
                decision.node.depth,
                step.source.value,
                readable,
                dict(decision.scores),
                decision.went_back,
            )
        )

    # --- dispatch ---

    def dispatch(self) -> None:
        """Start work on the devices that are free, by the plan."""
        plan = self.engine.plan
        situation = Situation(
            self.need,
            self.base,
            self.known,
            self._ends,
            plan_cold(plan, self.held),
            fallback(self.memory, self.base) if plan.alternatives else None,
            tuple(self._streams()) if plan.shadow_sync else (),
        )
        free = set(plan.placement.values()) - set(self.running)
        now = {device: r.start.request for device, r in self.running.items()}
        starts, _ = dispatch(plan, situation, now, free)
        for device, start in starts.items():
            work = self._work(start)
            self.running[device] = _Running(start, work)
            self.engine.workers.submit(device, work, self._delay_us(device, start))

    def _work(self, start: Start) -> Work:
        """The next chunk of a request: what the cache lacks, then up to a chunk of new tokens."""
        plan, request = self.engine.plan, start.request
        role = request.role
        last = max((request, *start.also), key=lambda r: r.node.depth)
        begun = self._begun(request)
        wanted = [*self._tokens(role, last.node), *begun]
        held = self.held.setdefault(role, [])
        keep = _common_prefix(held, wanted)
        feed = tuple(wanted[keep:])
        self.held[role] = wanted
        common = {"role": role.value, "sequence": "0", "keep": keep, "feed": feed}
        if request.op is Op.VERIFY:
            ends = (len(self._tokens(role, r.node)) - 1 for r in (request, *start.also))
            return Work(**common, score=tuple(ends))
        if request.op in (Op.PREFILL, Op.SYNC):
            return Work(**common)
        sampling = plan.workflow.sampling
        return Work(
            **common,
            max_new=min(plan.chunk_tokens, self._step_limit(request.node) - len(begun)),
            key=request.sampling_key(sampling.seed),
            temperature=sampling.temperature,
        )

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
        begun, models = self._begun(self.need), self.engine.models
        for role in (RoleName.DRAFT, RoleName.PRM):
            same = role in models and models[role].tokenizer_hash == models[self.need.role].tokenizer_hash
            if same and self.held.get(role) != [*self._tokens(role, self.need.node), *begun]:
                yield Request(Op.SYNC, self.need.node, role, len(begun))

    def _step_limit(self, node: Node) -> int:
        """Most tokens of the step after `node`."""
        budget = self.engine.plan.workflow.budget
        return min(budget.step_tokens, budget.tokens - sum(len(s.tokens) for s in node.path))

    def _tokens(self, role: RoleName, node: Node) -> list[int]:
        """The prompt and the steps up to `node` in the tokens of a role."""
        tokens = list(self.prompt[role])
        for step in node.path:
            tokens += self._step_tokens(role, step)
        return tokens

    def _step_tokens(self, role: RoleName, step: Step) -> tuple[int, ...]:
        models = self.engine.models
        if models[role].tokenizer_hash == models[step.source].tokenizer_hash:
            return step.tokens
        text = step.text + self.engine.problems.delimiter
        return self.engine.workers.encode(self.engine.plan.placement[role], role, text)

    def _delay_us(self, device: str, start: Start) -> int:
        """Until the tokens, and the verdict, that a piece of work depends on have reached its device."""
        plan, request = self.engine.plan, start.request
        sources = set()
        if request.node.step is not None:
            sources.add(plan.placement[request.node.step.source])
        if request.op in (Op.REFINE, Op.BACKTRACK) and not start.speculative and RoleName.PRM in plan.placement:
            sources.add(plan.placement[RoleName.PRM])
        if request in self.partial or request.op in (Op.PREFILL, Op.SYNC):
            return 0
        payload = plan.workflow.statistics.target_step_tokens * TOKEN_BYTES
        return max((transfer_us(plan.machine, source, device, payload) for source in sources), default=0)

    def _ends(self, node: Node) -> bool:
        return ended(self.engine.plan.workflow, node, self.engine.problems.answer) is not None

    # --- commit ---

    def commit(self, done: Done) -> None:
        """Take in a chunk that is over and let the policy go on as far as it can."""
        running = self.running.pop(done.device)
        self._record(done, running)
        request, output = running.start.request, done.output
        self.held[request.role] += output.tokens
        if request.op is Op.VERIFY:
            requests = (request, *running.start.also)
            for asked, score in zip(requests, _scores(output, len(requests), done.device), strict=True):
                self.known[asked] = rounded(score)
        elif request.op not in (Op.PREFILL, Op.SYNC):
            if not 0 < len(output.tokens) <= running.work.max_new:
                asked = f"1 to {running.work.max_new} were asked for"
                raise RuntimeError(f"device {done.device} wrote {len(output.tokens)} tokens where {asked}")
            self._written(request, output)
        self._advance()

    def _written(self, request: Request, output: Output) -> None:
        """Add a chunk to the step that it belongs to; a step that is whole becomes a result."""
        begun = self.partial.setdefault(request, [])
        begun += output.tokens
        if not (output.complete or output.ended or len(begun) >= self._step_limit(request.node)):
            return
        role, delimiter = request.role, self.engine.problems.delimiter
        text = self.engine.workers.decode(self.engine.plan.placement[role], role, tuple(begun))
        text, _, _ = text.partition(delimiter)
        self.known[request] = Step(text, tuple(self.partial.pop(request)), role, output.ended)

    def _record(self, done: Done, running: _Running) -> None:
        request, work = running.start.request, running.work
        self.engine.sink(
            Chunk(
                self.problem.key,
                done.device,
                request.role,
                request.op,
                running.start.round,
                _name(request),
                done.start_us,
                done.end_us,
                len(work.feed),
                len(done.output.tokens),
                work.keep,
                running.start.speculative,
                done.output.cycles,
            )
        )

    def finish(self) -> None:
        """Let what is still running come to its end; it was for nothing."""
        while self.running:
            done = self.engine.workers.wait(CHUNK_TIMEOUT_S)
            self._record(done, self.running.pop(done.device))
        assert self.outcome is not None, "a session finishes after its policy"
        prefill = [Request(Op.PREFILL, Node(None, None, self.problem.key), r) for r in self.prompt]
        used = [*prefill, *self.synced, *self.asked, *map(_twin, self.asked)]
        solved = self.solved()
        self.engine.sink(
            ProblemEnded(
                self.problem.key,
                self.end_us,
                self.outcome.status,
                solved.answer,
                solved.correct,
                solved.steps,
                tuple(dict.fromkeys(map(_name, used))),
            )
        )

    def solved(self) -> Solved:
        """What the run gave."""
        assert self.outcome is not None, "a session is asked for its result at its end"
        problems, texts = self.engine.problems, [s.text for s in self.outcome.node.path]
        steps = tuple(map(problems.readable, texts))
        correct = problems.grade(self.problem, texts)
        return Solved(self.problem, self.outcome, steps, self.outcome.answer, correct, self.end_us - self.start_us)

    def _check_room(self) -> None:
        budget = self.engine.plan.workflow.budget
        for role, prompt in self.prompt.items():
            room = self.engine.models[role].context_tokens
            if not prompt:
                raise UserError("the prompt is empty", where=f"problem {self.problem.key}", mend="write a question")
            if len(prompt) + budget.tokens > room:
                raise UserError(
                    f"prompt and budget need {len(prompt) + budget.tokens} tokens and role {role} holds {room}",
                    where=f"workflow {self.engine.plan.workflow.name}",
                    mend="raise numerics.cache_tokens or lower budget.tokens",
                )


def plan_cold(plan: Plan, held: Mapping[RoleName, list[int]]) -> set[RoleName]:
    """The roles that have not begun to read the prompt."""
    return {role for role in plan.roles if role not in held}


def _common_prefix(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _scores(output: Output, count: int, device: str) -> tuple[float, ...]:
    if len(output.scores) != count or not all(0.0 <= score <= 1.0 for score in output.scores):
        wanted = "one score from 0 to 1 was" if count == 1 else f"{count} scores from 0 to 1 were"
        raise RuntimeError(f"device {device} answered {output.scores} where {wanted} asked for")
    return output.scores


def _twin(request: Request) -> Request:
    """The same step by another name: an alternative after an ancestor is what the target would write there first."""
    return replace(request, op=Op.REFINE) if request.op is Op.BACKTRACK else request


def _name(request: Request) -> str:
    return f"{request.op}:{request.role}:{request.node.key}:{request.attempt}"
