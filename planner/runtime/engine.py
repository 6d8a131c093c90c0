"""The engine: decide what the policies need, dispatch what the plan allows, commit what came back.

One turn of the loop admits problems, takes up a new plan if there is one, starts work on the devices that are free,
and waits for the next chunk. What a device does wrong comes back as a `Fault` in place of an output: the work is done
again there, or the device is taken out and the run goes on by a plan without it. Answers do not change by either.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from planner.dispatch import Start, dispatch
from planner.errors import UserError
from planner.machine import Machine
from planner.plan import Plan
from planner.policy import Node, Outcome, Request, Status
from planner.problems.base import Problem, ProblemSet, label_of
from planner.runtime.backend import ModelInfo, Work
from planner.runtime.devices import Devices, Replan
from planner.runtime.faults import LAST, DeviceFault, Fault, wrong_output
from planner.runtime.host import Journal, Solved
from planner.runtime.session import Session
from planner.runtime.worker import Done, Patience, Workers
from planner.trace import Event, Faulted, ProblemEnded, ProblemStarted, Replanned, RunStarted, Sink
from planner.workflow import RoleName

RETRIES = 2
"""How often in a row a device may fail before it is taken out."""


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

    def __post_init__(self) -> None:
        """Raise UserError for a load under which nothing could ever run."""
        if self.concurrency < 1:
            raise UserError(f"concurrency is {self.concurrency}", where="load", mend="use 1 or more")


class Watch(Protocol):
    """Looks at the events of a run and may ask for another plan."""

    def see(self, event: Event) -> None:
        """An event has happened."""
        ...

    def proposal(self, plan: Plan, machine: Machine) -> tuple[str, Plan] | None:
        """Why, and by which plan, to go on from here on the devices that are there; None: by the present one."""
        ...


@dataclass(frozen=True)
class _Running:
    session: Session
    start: Start
    work: Work


Waiting = deque[tuple[int | None, Problem]]


class Engine:
    """Runs problems by a plan. Workers, journal and trace are the caller's to close."""

    def __init__(
        self,
        plan: Plan,
        workers: Workers,
        problems: ProblemSet,
        sink: Sink,
        *,
        journal: Journal | None = None,
        replan: Replan | None = None,
        patience: Patience | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Load every role on its device. Raises UserError for a model or device that cannot do it.

        `replan` makes a plan for the devices that are left when one is lost; without it a lost device ends the run.
        `patience` says when a chunk counts as hung. `watch` may propose other plans as the run goes on.
        """
        self.workers, self.problems, self.journal = workers, problems, journal
        self._patience, self._watch, self._sink = patience or Patience(), watch, sink
        self._sessions: dict[str, Session] = {}
        """The problems at hand by label, the oldest first."""
        self._running: dict[str, _Running] = {}
        """What each device is busy with."""
        self._ended: deque[Solved] = deque()
        """Results that are ready to be handed out."""
        self._seen: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        """How often in a row each device has failed."""
        self._again: defaultdict[str, Counter[tuple[str, Request | None]]] = defaultdict(Counter)
        """How often in a row a device has failed at the same request of a problem, or at its text. Another that it
        does well in between, such as reading what it has forgotten, is no progress."""
        self._devices = Devices(plan, workers, problems.delimiter, replan)
        self.sink(RunStarted(plan.hash, plan.name, workers.clock))
        self._border(first=True)

    @property
    def plan(self) -> Plan:
        """The plan that is followed now."""
        return self._devices.plan

    @property
    def models(self) -> Mapping[RoleName, ModelInfo]:
        """What is known of each role's model."""
        return self._devices.models

    def solve(self, problem: Problem) -> Solved:
        """Run the policy on one problem to its end. Raises UserError for one that cannot be run."""
        solved = next(iter(self.solve_all([problem])))
        if solved.error is not None:
            raise solved.error
        return solved

    def solve_all(self, problems: Iterable[Problem], load: Load | None = None) -> Generator[Solved, None, None]:
        """Run the policy on each problem; results come in the order in which they are ready.

        A problem that cannot be run comes with the status `error`. One that the journal knows to be over is left out.
        Closing the generator gives up what is not over; the engine then takes other problems.
        """
        load = load or Load()
        if self._sessions:
            raise RuntimeError("the engine is at work on other problems: take their results first, or close them")
        try:
            yield from self._solve(_arrivals(problems, load, self.now_us()), load)
        finally:
            # Whoever takes no more results gives the rest up. Chunks that still run for it end as nobody's.
            self._sessions.clear()
            self._ended.clear()
            self._again.clear()

    def _solve(self, waiting: Waiting, load: Load) -> Iterator[Solved]:
        slots = [str(n) for n in reversed(range(load.concurrency))]
        while waiting or self._sessions:
            try:
                self._border()
                self._admit(waiting, slots, load.deadline_us)
                self._dispatch()
                to_come = waiting if slots and not self._devices.due else deque()
                self._commit(_next_event(to_come, self._sessions.values()))
            except DeviceFault as failed:
                # A tokenizer's device: nothing was committed of what it was asked for.
                self._failed(failed.device, failed.fault, None)
            self._close(slots)
            while self._ended:
                yield self._ended.popleft()

    def swap(self, plan: Plan, why: str = "asked for") -> None:
        """Go on by another plan of the same workflow, once no chunk is running. Raises UserError if it is not one."""
        self._devices.propose(plan, why)

    def remove(self, device: str) -> None:
        """Go on without a device, once no chunk is running. Raises UserError for one that is not there."""
        self._devices.remove(device)

    def add(self, device: str) -> None:
        """Use a device of the plan's machine again that was removed or lost. Raises UserError for another."""
        self._failures.pop(device, None)
        self._devices.add(device)

    # --- what a session asks of its host ---

    def sink(self, event: Event) -> None:
        """Put an event into the trace."""
        if self._watch is not None:
            self._watch.see(event)
        self._sink(event)

    def encode(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a text for a role."""
        return self.workers.encode(self.plan.placement[role], role, text)

    def encode_prompt(self, role: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a prompt for a role."""
        return self.workers.encode_prompt(self.plan.placement[role], role, text)

    def now_us(self) -> int:
        """The time now."""
        return self.workers.now_us()

    # --- the loop's verbs ---

    def _admit(self, waiting: Waiting, slots: list[str], deadline_us: int | None) -> None:
        """Begin problems that have arrived, as long as there is a slot for one; none if another plan is due."""
        while not self._devices.due and slots and waiting and (waiting[0][0] is None or waiting[0][0] <= self.now_us()):
            arrived_us, problem = waiting[0]
            times = self._seen[problem.key] + 1
            label = label_of(problem, times)
            arrived = self.now_us() if arrived_us is None else arrived_us
            deadline = None if deadline_us is None else arrived + deadline_us
            session = None
            if self.journal is None or not self.journal.ended(label):
                try:
                    session = Session(self, problem, label, slots[-1], arrived, deadline)
                except UserError as error:
                    self._refuse(problem, label, arrived, error)
                except DeviceFault as failed:
                    if not self._text_is_bad(label, None, failed):
                        raise
                    mend = "write the problem otherwise"
                    where = f"problem {label}"
                    self._refuse(problem, label, arrived, UserError(failed.fault.what, where=where, mend=mend))
            # Only now: if the device of a tokenizer fails, the problem is the next one again.
            waiting.popleft()
            self._seen[problem.key] = times
            self._again.pop(label, None)
            if session is not None:
                self._sessions[label] = session
                slots.pop()
                session.begin()
                session.expire(self.now_us())  # it may have waited for longer than it has

    def _text_is_bad(self, label: str, request: Request | None, failed: DeviceFault) -> bool:
        """Whether a device has failed again and again at making tokens of a text, and does so of others."""
        self._again[label][failed.device, request] += 1
        times = self._again[label][failed.device, request]
        if failed.fault.kind in LAST or times <= RETRIES or not self._reads(failed.device):
            return False
        self._failures.pop(failed.device, None)
        return times > RETRIES + 1  # once more after it has read another: what was wrong with it may be over

    def _reads(self, device: str) -> bool:
        """Whether a device can make tokens of the shortest text."""
        try:
            for role in (role for role, place in self.plan.placement.items() if place == device):
                self.encode_prompt(role, self.problems.delimiter)
                self.encode(role, self.problems.delimiter)
        except DeviceFault as failed:
            if failed.fault.kind in LAST:
                raise
            return False
        except UserError:
            pass  # it has looked at it
        return True

    def _border(self, first: bool = False) -> None:
        """Where no chunk is running, go on by another plan if there is one to go on by."""
        if self._watch is not None and not first and not self._devices.due:
            proposal = self._watch.proposal(self.plan, self._devices.machine)
            with suppress(UserError):  # devices may have come and gone since it was made
                if proposal is not None:
                    self._devices.propose(proposal[1], proposal[0])
        if self._running or not self._devices.due:
            return
        for change in self._devices.change():
            if isinstance(change, DeviceFault):
                self._note_fault(change.device, change.fault, None, lost=True)
                continue
            for session in self._sessions.values():
                session.forget(change.moved)
            if change.why:
                plan, placement = self.plan, {str(r): d for r, d in self.plan.placement.items()}
                prefill_on = {str(r): d for r, d in plan.prefill_on.items()}
                self.sink(Replanned(self.now_us(), change.why, plan.hash, plan.name, placement, prefill_on))

    def _dispatch(self) -> None:
        """Start work on the devices that are free, by the plan; none if another plan is due."""
        while not self._devices.due and not all(self._start(device, s) for device, s in self._starts().items()):
            pass  # what cannot be written in a role's tokens leaves its device to something else

    def _starts(self) -> dict[str, Start]:
        """What each device that is free starts."""
        situations = {s.label: s.situation() for s in self._sessions.values() if s.outcome is None}
        busy = {member for device in self._running for member in self.plan.machine.members(device)}
        every = {member for place in self.plan.places for member in self.plan.machine.members(place)}
        return dispatch(self.plan, situations, every - busy)

    def _start(self, device: str, start: Start) -> bool:
        """Start work on a free device, unless it cannot be written in its role's tokens."""
        session = self._sessions[start.problem]
        try:
            work = session.work(start)
        except UserError as error:
            session.cannot(start, error)
            return False
        except DeviceFault as failed:
            if not self._text_is_bad(session.label, start.request, failed):
                raise
            mend = "see why the tokenizer fails at a step of it"
            session.cannot(start, UserError(failed.fault.what, where=f"problem {session.label}", mend=mend))
            return False
        self._running[device] = _Running(session, start, work)
        self.workers.submit(device, work, session.delay_us(device, start), self._patience.limit_us(device, work))
        return True

    def _commit(self, until_us: int | None) -> None:
        """Wait for the next chunk, take it in, and end what is out of time."""
        if self._running or (until_us is not None and not self._devices.due):
            done = self.workers.wait(until_us)
            if done is not None:
                self._take(done, self._running.pop(done.device))
        elif not self._devices.due and any(s.outcome is None for s in self._sessions.values()):
            raise RuntimeError("nothing runs, and problems are not over: the plan starts none of what is needed")
        for session in self._sessions.values():
            session.expire(self.now_us())

    def _take(self, done: Done, running: _Running) -> None:
        """Commit what a chunk gave, or do what its fault asks for."""
        kv_bytes = self.models[running.start.request.role].kv_bytes_per_token
        fault = done.fault or wrong_output(running.work, done.output, kv_bytes)
        if fault is not None:
            self._failed(done.device, fault, running, done.end_us - done.start_us)
            return
        self._failures.pop(done.device, None)
        self._again[running.session.label].pop((done.device, running.start.request), None)
        running.session.record(running.start, running.work, done)
        given_up = self._sessions.get(running.session.label) is not running.session
        if running.session.outcome is None and not given_up:
            running.session.commit(running.start, running.work, done.output)

    def _failed(self, device: str, fault: Fault, running: _Running | None, busy_us: int = 0) -> None:
        """Have the work done again on the device, or take the device out."""
        self._failures[device] += 1
        times = self._failures[device]
        if running is not None:
            again, at = self._again[running.session.label], (device, running.start.request)
            again[at] += 1
            times = max(times, again[at])
        lost = fault.kind in LAST or times > RETRIES
        self._note_fault(device, fault, running, lost, busy_us)
        if running is not None:
            running.session.forget([running.start.request.role])
        if lost:
            self._running.pop(device, None)
            self._devices.lose(device, fault)

    def _close(self, slots: list[str]) -> None:
        """Hand out the problems that have their outcome, and for which nothing runs any more."""
        busy = {running.session.label for running in self._running.values()}
        for session in [s for s in self._sessions.values() if s.outcome is not None and s.label not in busy]:
            del self._sessions[session.label]
            slots.append(session.slot)
            self._again.pop(session.label, None)
            self._ended.append(session.close())

    def _refuse(self, problem: Problem, label: str, arrived_us: int, error: UserError) -> None:
        """Account for a problem that cannot be run."""
        outcome = Outcome(Status.ERROR, None, Node(None, None, problem.key), ())
        solved = Solved(problem, outcome, (), None, False, self.now_us() - arrived_us, label, error)
        if self.journal is not None:
            self.journal.end(solved)
        self.sink(ProblemStarted(label, problem.question, self.now_us(), arrived_us))
        self.sink(ProblemEnded(label, self.now_us(), Status.ERROR, None, False, (), (), error=str(error)))
        self._ended.append(solved)

    def _note_fault(self, device: str, fault: Fault, running: _Running | None, lost: bool, busy_us: int = 0) -> None:
        label, request = (running.session.label, running.start.request.name) if running else ("", "")
        self.sink(Faulted(self.now_us(), device, fault.kind.value, fault.what, lost, label, request, busy_us))


def _arrivals(problems: Iterable[Problem], load: Load, now_us: int) -> Waiting:
    """Each problem with the time that it arrives at, None for those that are there already; the first to come first."""
    todo, arrivals = list(problems), load.arrivals_us
    if arrivals is None:
        return deque((None, problem) for problem in todo)
    if len(arrivals) != len(todo):
        what = f"there are {len(arrivals)} arrivals for {len(todo)} problems"
        raise UserError(what, where="load", mend="give a time for each problem")
    order = sorted(range(len(todo)), key=lambda number: arrivals[number])
    return deque((now_us + arrivals[number], todo[number]) for number in order)


def _next_event(waiting: Waiting, sessions: Iterable[Session]) -> int | None:
    """When something is to be done though no chunk is over: a problem arrives, or its time is up."""
    times = [s.deadline_us for s in sessions if s.deadline_us is not None and s.outcome is None]
    if waiting and waiting[0][0] is not None:
        times.append(waiting[0][0])
    return min(times, default=None)
