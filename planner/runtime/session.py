"""One problem in the engine: its policy, the results so far, and what each cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from planner.dispatch import Situation, Start
from planner.errors import UserError
from planner.graph import Op
from planner.machine import transfer_us
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
from planner.problems.base import Problem
from planner.runtime.backend import Handed, Output, Sibling, Work
from planner.runtime.caches import Caches
from planner.runtime.host import Host, Solved
from planner.runtime.worker import Done
from planner.trace import Chunk, Decided, ProblemEnded, ProblemStarted
from planner.workflow import VERIFIER, RoleName, SelfScore


@dataclass(frozen=True)
class _Stream:
    """The step of the target that may be committed next, as far as it is written."""

    node: Node
    """Where it is written."""
    tokens: list[int]
    beside: bool
    """Whether there is another guess: the verdict on the draft is not in."""


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
    handed: dict[RoleName, Handed] = field(default_factory=dict)
    """Prompts that were read elsewhere, on the way to the role's device."""
    asked: list[Request] = field(default_factory=list)
    """What the policy asked for, in order: the work that counted."""
    synced: list[Request] = field(default_factory=list)
    """SYNC that ran: it counted if the policy asked for the step that it read."""
    writers: dict[str, Request] = field(default_factory=dict)
    """Key of a committed place -> the request that wrote the step there."""
    resumed: bool = False
    """Whether the policy's last result is one that an earlier run was given."""
    unfit: set[Request] = field(default_factory=set)
    """What runs ahead and cannot be written in its role's tokens."""
    texts: dict[tuple[RoleName, Step], tuple[int, ...]] = field(default_factory=dict)
    """Steps in the tokens of roles that have others than their writer."""
    outcome: Outcome | None = None
    error: UserError | None = None
    end_us: int = 0

    def __post_init__(self) -> None:
        plan, problems = self.host.plan, self.host.problems
        self.caches = Caches(self.slot)
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
            # Of several runs the first: which of them would have been elected is not known.
            end = self.memory.first_end or self.base
            answer = self.host.problems.answer(end.step.text) if end.step else None
            self._end(Status.DEADLINE, end, now_us, answer)

    def cannot(self, start: Start, error: UserError) -> None:
        """Work cannot be written in its role's tokens: what runs ahead is left, what the policy waits for ends it."""
        ahead = {request for request in (start.request, *start.also) if request != self.need}
        self.unfit |= ahead
        if not ahead:
            self.error = error
            self._end(Status.ERROR, self.base, self.host.now_us())

    def _end(self, status: Status, node: Node, now_us: int, answer: str | None = None) -> None:
        self.outcome, self.end_us = Outcome(status, answer, node, tuple(self.memory.decisions)), now_us

    def _noted(self, request: Request) -> Result:
        """A result that the policy goes on with, once it is in the journal."""
        result, name = self.known[request], request.name
        self.resumed = self.recorded.pop(name, None) is not None
        if not self.resumed and self.host.journal is not None:
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
                self.resumed,
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
            {role for role in plan.roles if role not in self.caches},
            fallback(self.memory, self.base) if plan.alternatives else None,
            tuple(self._streams()) if plan.shadow_sync else (),
            frozenset(self.handed),
            frozenset(self.unfit),
            RoleName.DRAFT in self.prompt and self.host.models[RoleName.DRAFT].batches,
        )

    def work(self, start: Start) -> Work:
        """The next chunk of a request: what the cache lacks, then up to a chunk of new tokens.

        Raises UserError or DeviceFault where a text has to be read for it, before anything is noted.
        """
        plan, request = self.host.plan, start.request
        role = request.role
        if role in plan.prefill_on and request.op in (Op.PREFILL, Op.TRANSFER):
            return self._prompt_elsewhere(request)
        last = max((request, *start.also), key=lambda r: r.node.depth)
        stream = self._stream() if request.op is Op.SYNC else None
        begun = tuple(stream.tokens if stream else self._begun(request))
        wanted = [*self._tokens(role, last.node), *begun]
        scored = (request, *start.also) if request.op is Op.VERIFY else ()
        ends = tuple(len(self._tokens(role, r.node)) - 1 for r in scored)
        # From here on nothing may fail: what is read is noted as read.
        read = self.caches.read_beside if stream and stream.beside else self.caches.read
        reading = read(role, wanted)
        common = {"role": role.value, "label": request.name, **vars(reading)}
        if request.op is Op.VERIFY:
            return Work(**common, score=ends, **self._question(role))
        if request.op is Op.SYNC:
            self.synced.append(request)
        if request.op in (Op.PREFILL, Op.SYNC):
            return Work(**common)
        sampling, limit = plan.workflow.sampling, self._step_limit(request.node)
        return Work(
            **common,
            max_new=min(plan.chunk_tokens, limit - len(begun)),
            key=request.sampling_key(sampling.seed),
            temperature=temperature(plan.workflow, request),
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            begun=begun,
            step_tokens=limit,
            beside=tuple(self._sibling(other, limit) for other in start.also),
        )

    def _sibling(self, request: Request, limit: int) -> Sibling:
        """Another draft of the step, as far as it is written."""
        plan, begun = self.host.plan, tuple(self._begun(request))
        return Sibling(
            request.sampling_key(plan.workflow.sampling.seed), begun, min(plan.chunk_tokens, limit - len(begun))
        )

    def _question(self, role: RoleName) -> dict[str, Any]:
        """What a role that writes, too, is asked for when it scores; a reward model is asked nothing."""
        if role is RoleName.PRM:
            return {}
        expectation = self.host.plan.workflow.policy.self_score is SelfScore.EXPECTATION
        return {"ask": self.score_prompt, "expectation": expectation}

    def delay_us(self, device: str, start: Start) -> int:
        """Until a chunk is sent, and the tokens, and the verdict, that it depends on have reached its device."""
        plan, request = self.host.plan, start.request
        sent = round(plan.machine.dispatch_us)
        if request.op is Op.TRANSFER:
            size = len(self.prompt[request.role]) * self.host.models[request.role].kv_bytes_per_token
            return sent + transfer_us(plan.machine, plan.prefill_on[request.role], device, size)
        if request in self.partial or request.op in (Op.PREFILL, Op.SYNC):
            return sent
        sources = set()
        if request.node.step is not None:
            sources.add(plan.placement[request.node.step.source])
        verifier = VERIFIER.get(plan.workflow.policy.kind)
        if verifier is not None and not start.speculative:
            scored = Request(Op.VERIFY, request.node, verifier) in self.known
            if request.op in (Op.REFINE, Op.BACKTRACK) or (request.op is Op.DRAFT and scored and not request.attempt):
                sources.add(plan.placement[verifier])
        size = plan.workflow.statistics.step_bytes
        return sent + max((transfer_us(plan.machine, source, device, size) for source in sources), default=0)

    def _prompt_elsewhere(self, request: Request) -> Work:
        """Read a role's prompt on the device that the plan names for it, or take over what was read there."""
        role, prompt = request.role, self.prompt[request.role]
        if request.op is Op.PREFILL:
            common = {"role": role.value, "label": request.name, "feed": prompt, "hand_over": True}
            return Work(**common, sequence=f"{self.slot}.prompt", keep=0)
        sequence, handed = self.caches.read(role, prompt).sequence, self.handed.pop(role)
        return Work(role.value, sequence, len(prompt), (), handed=handed, label=request.name)

    def _begun(self, request: Request) -> list[int]:
        """The tokens of a step that is being written."""
        if request not in self.partial and _twin(request) in self.partial:
            self.partial[request] = self.partial.pop(_twin(request))
        return self.partial.get(request, [])

    def _streams(self) -> Iterator[Request]:
        """SYNC for each role that can read on in the step of the target that may be committed next."""
        stream, models = self._stream(), self.host.models
        if stream is None:
            return
        for role in (RoleName.DRAFT, RoleName.PRM):
            same = role in models and models[role].tokenizer_hash == models[RoleName.TARGET].tokenizer_hash
            if not same or (stream.beside and not (stream.tokens and role in self.caches)):
                continue
            if not all(self._has_tokens(role, step) for step in stream.node.path):
                continue  # no tokenizer is waited for to run ahead
            if not self.caches.hold(role, [*self._tokens(role, stream.node), *stream.tokens]):
                yield Request(Op.SYNC, stream.node, role, len(stream.tokens))

    def _stream(self) -> _Stream | None:
        """What draft and verifier may read of the target's step before they are asked to; None if there is none."""
        need, step = self.need, self.need.node.step
        if need.op in (Op.REFINE, Op.BACKTRACK):
            return _Stream(need.node, self._begun(need), beside=False)
        if need.op is Op.VERIFY and need.node.parent and step is not None and step.source is RoleName.TARGET:
            return _Stream(need.node.parent, list(step.tokens), beside=False)
        if not self.host.plan.sync_ahead or RoleName.TARGET not in self.prompt:
            return None
        refine = Request(Op.REFINE, self.base, RoleName.TARGET)
        whole = self.known.get(refine)
        return _Stream(self.base, list(whole.tokens) if isinstance(whole, Step) else self._begun(refine), beside=True)

    def _step_limit(self, node: Node) -> int:
        """Most tokens of the step after `node`."""
        budget = self.host.plan.workflow.budget
        return min(budget.step_tokens, budget.tokens - node.tokens)

    def _tokens(self, role: RoleName, node: Node) -> list[int]:
        """The prompt and the steps up to `node` in the tokens of a role."""
        tokens = list(self.prompt[role])
        for step in node.path:
            tokens += self._step_tokens(role, step)
        return tokens

    def _has_tokens(self, role: RoleName, step: Step) -> bool:
        return self._shares_tokens(role, step) or (role, step) in self.texts

    def _shares_tokens(self, role: RoleName, step: Step) -> bool:
        models = self.host.models
        return models[role].tokenizer_hash == models[step.source].tokenizer_hash

    def _step_tokens(self, role: RoleName, step: Step) -> tuple[int, ...]:
        if self._shares_tokens(role, step):
            return step.tokens
        if (role, step) not in self.texts:
            self.texts[role, step] = self.host.encode(role, step.text + self.host.problems.delimiter)
        return self.texts[role, step]

    def _ends(self, node: Node) -> bool:
        return ended(self.host.plan.workflow, node, self.host.problems.answer) is not None

    # --- commit ---

    def forget(self, roles: Iterable[RoleName]) -> None:
        """The caches of these roles are lost: what they need is read again from the first token on."""
        for role in roles:
            self.caches.forget(role)

    def commit(self, start: Start, work: Work, output: Output) -> None:
        """Take in a chunk that is over and let the policy go on as far as it can."""
        request = start.request
        if output.handed is not None:
            self.handed[request.role] = output.handed
        if request.op is Op.VERIFY:
            requests = (request, *start.also)
            for asked, score in zip(requests, output.scores, strict=True):
                self.known[asked] = rounded(score)
        elif work.max_new:
            self._written(request, work.begun, output)
            for other, sibling, written in zip(start.also, work.beside, output.beside, strict=True):
                self._written(other, sibling.begun, written)
            self.caches.append(request.role, work.sequence, output.tokens)
        self.advance()

    def _written(self, request: Request, begun: tuple[int, ...], output: Output) -> None:
        """Add a chunk to the step that it belongs to; a step that is over becomes a result."""
        tokens = (*begun, *output.tokens)
        if output.text is None:
            self.partial[request] = list(tokens)
            return
        text, _, _ = output.text.partition(self.host.problems.delimiter)
        self.known[request] = Step(text, tokens, request.role, output.ended)
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
                work.tokens_in,
                done.output.tokens_out,
                work.keep,
                start.speculative,
                done.output.cycles,
                {r.name: len(o.tokens) for r, o in zip(start.also, done.output.beside, strict=False)},
            )
        )

    def close(self) -> Solved:
        """Put the end into the trace, once nothing runs for the problem any more, and give its result."""
        assert self.outcome is not None, "a session closes after its policy"
        # Each of several runs has a root of its own.
        roots = dict.fromkeys(list(request.node.lineage())[-1] for request in self.asked)
        reading = [(op, role) for op in (Op.PREFILL, Op.TRANSFER) for role in self.prompt]
        prefill = [Request(op, root, role) for root in roots for op, role in reading]
        written = {request.node for request in self.asked if request.op in (Op.REFINE, Op.BACKTRACK)}
        synced = [request for request in self.synced if request.node in written]
        used = [*prefill, *synced, *self.asked, *map(_twin, self.asked)]
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
                str(self.error or ""),
            )
        )
        return solved

    def _solved(self, outcome: Outcome) -> Solved:
        problems, texts = self.host.problems, [s.text for s in outcome.node.path]
        steps = tuple(map(problems.readable, texts))
        correct = problems.grade(self.problem, texts)
        took_us = self.end_us - self.arrived_us
        return Solved(self.problem, outcome, steps, outcome.answer, correct, took_us, self.label, self.error)

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


def _twin(request: Request) -> Request:
    """The same step by another name: an alternative after an ancestor is what the target would write there first."""
    return replace(request, op=Op.REFINE) if request.op is Op.BACKTRACK else request
