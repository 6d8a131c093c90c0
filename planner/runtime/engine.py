"""The engine: decide what the policies need, dispatch what the plan allows, commit what came back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.dispatch import Start, dispatch
from planner.plan import Plan
from planner.problems.base import Problem, ProblemSet
from planner.runtime.backend import ModelInfo, Work
from planner.runtime.session import Session, Solved
from planner.runtime.worker import Workers
from planner.trace import RunStarted, Sink
from planner.workflow import RoleName

CHUNK_TIMEOUT_S = 120.0
"""Longest wait for a chunk."""


@dataclass(frozen=True)
class Load:
    """How problems come to the engine, and how long each may take."""

    concurrency: int = 1
    """Problems that are worked on at once."""
    arrivals_us: Sequence[int] | None = None
    """When each problem arrives, after the start of the run; None: all are there from the start, and a problem's
    latency counts from its admission."""
    deadline_us: int | None = None
    """Longest time for a problem, after which its run ends with what is committed."""


@dataclass(frozen=True)
class _Running:
    session: Session
    start: Start
    work: Work


class Engine:
    """Runs problems by a plan. Workers and trace are the caller's to close."""

    def __init__(self, plan: Plan, workers: Workers, problems: ProblemSet, sink: Sink) -> None:
        """Load every role on its device. Raises UserError for a model or device that cannot do it."""
        self.plan, self.workers, self.problems, self.sink = plan, workers, problems, sink
        roles = plan.workflow.roles
        placed = {name: (plan.placement[name], roles[name]) for name in plan.roles}
        self.models: Mapping[RoleName, ModelInfo] = workers.load(placed, problems.delimiter)
        self._sessions: dict[str, Session] = {}
        """The problems at hand by label, the oldest first."""
        self._running: dict[str, _Running] = {}
        """What each device is busy with."""
        self._seen: Counter[str] = Counter()
        sink(RunStarted(plan.hash, plan.name, workers.clock))

    def solve(self, problem: Problem) -> Solved:
        """Run the policy on one problem to its end."""
        return next(iter(self.solve_all([problem])))

    def solve_all(self, problems: Iterable[Problem], load: Load | None = None) -> Iterator[Solved]:
        """Run the policy on each problem; results come in the order in which they are ready."""
        load = load or Load()
        waiting = _arrivals(problems, load, self.now_us())
        slots = [str(n) for n in reversed(range(load.concurrency))]
        while waiting or self._sessions:
            while slots and waiting and (waiting[0][0] is None or waiting[0][0] <= self.now_us()):
                self._admit(*waiting.popleft(), slots.pop(), load.deadline_us)
            self._dispatch()
            self._commit(_next_event(waiting if slots else deque(), self._sessions.values()))
            for session in self._over():
                del self._sessions[session.label]
                slots.append(session.slot)
                yield session.close()

    # --- what a session asks of its host ---

    def encode(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a text for a role."""
        return self.workers.encode(self.plan.placement[role], role, text)

    def encode_prompt(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a prompt for a role."""
        return self.workers.encode_prompt(self.plan.placement[role], role, text)

    def decode(self, role: RoleName, tokens: tuple[int, ...]) -> str:
        """Text of a role's token ids."""
        return self.workers.decode(self.plan.placement[role], role, tokens)

    def now_us(self) -> int:
        """The time now."""
        return self.workers.now_us()

    # --- the loop's verbs ---

    def _admit(self, arrived_us: int | None, problem: Problem, slot: str, deadline_us: int | None) -> None:
        self._seen[problem.key] += 1
        times = self._seen[problem.key]
        label = problem.key if times == 1 else f"{problem.key}#{times}"
        arrived = self.now_us() if arrived_us is None else arrived_us
        deadline = None if deadline_us is None else arrived + deadline_us
        self._sessions[label] = Session(self, problem, label, slot, arrived, deadline)

    def _dispatch(self) -> None:
        """Start work on the devices that are free, by the plan."""
        situations = {s.label: s.situation() for s in self._sessions.values() if s.outcome is None}
        busy = {member for device in self._running for member in self.plan.machine.members(device)}
        every = {member for device in self.plan.placement.values() for member in self.plan.machine.members(device)}
        for device, start in dispatch(self.plan, situations, every - busy).items():
            session = self._sessions[start.problem]
            work = session.work(start)
            self._running[device] = _Running(session, start, work)
            self.workers.submit(device, work, session.delay_us(device, start))

    def _commit(self, until_us: int | None) -> None:
        """Wait for the next chunk, take it in, and end what is out of time."""
        done = self.workers.wait(CHUNK_TIMEOUT_S, until_us)
        if done is not None:
            running = self._running.pop(done.device)
            session, start, work = running.session, running.start, running.work
            session.record(start, work, done.output, done.device, done.start_us, done.end_us)
            if session.outcome is None:
                session.commit(start, work, done.output, done.device)
        for session in self._sessions.values():
            session.expire(self.now_us())

    def _over(self) -> list[Session]:
        """The problems that have their outcome, and for which nothing runs any more."""
        busy = {running.session.label for running in self._running.values()}
        return [s for s in self._sessions.values() if s.outcome is not None and s.label not in busy]


def _arrivals(problems: Iterable[Problem], load: Load, now_us: int) -> deque[tuple[int | None, Problem]]:
    """Each problem with the time that it arrives at, None for those that are there already."""
    if load.arrivals_us is None:
        return deque((None, p) for p in problems)
    return deque((now_us + at, p) for at, p in zip(load.arrivals_us, problems, strict=True))


def _next_event(waiting: deque[tuple[int | None, Problem]], sessions: Iterable[Session]) -> int | None:
    """When something is to be done though no chunk is over: a problem arrives, or its time is up."""
    times = [s.deadline_us for s in sessions if s.deadline_us is not None and s.outcome is None]
    if waiting and waiting[0][0] is not None:
        times.append(waiting[0][0])
    return min(times, default=None)
