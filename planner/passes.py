"""TaskGraph -> TaskGraph: what may be speculative. A pass is a frozen dataclass; its fields are its options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from planner.graph import WRITES, Edge, EdgeKind, Guard, Op, Task, TaskGraph, Verdict, holds, verify
from planner.workflow import RoleName


class Pass(Protocol):
    """A change of the graph that leaves its outcomes, and what is written and decided in each of them, as they are."""

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """The changed graph."""
        ...


@dataclass(frozen=True)
class DraftAhead:
    """Draft, and verify, up to `depth` steps on from a drafted step whose verdict is not known yet."""

    depth: int = 1

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Let DRAFT tasks, and VERIFY tasks of drafts, run ahead of the accepts at the end of their guards."""

        def run_ahead(task: Task) -> Task:
            if task.op is Op.DRAFT or (task.op is Op.VERIFY and reads_draft(graph, task.id)):
                return replace(task, ahead=max(task.ahead, min(self.depth, _trailing_accepts(graph, task))))
            return task

        return replace(graph, tasks=tuple(map(run_ahead, graph.tasks)))


@dataclass(frozen=True)
class PrefetchRefine:
    """Start the target on a step while the step is drafted and verified; on accept it is cancelled."""

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Let REFINE tasks run ahead of the verdict on the draft that they replace."""

        def run_ahead(task: Task) -> Task:
            prefetched = task.op is Op.REFINE and task.guard and task.guard[-1].verdict is Verdict.REJECT
            return replace(task, ahead=max(task.ahead, 1)) if prefetched else task

        return replace(graph, tasks=tuple(map(run_ahead, graph.tasks)))


def reads_draft(graph: TaskGraph, task: str) -> bool:
    """Whether a VERIFY task scores a drafted step."""
    return any(p.op is Op.DRAFT for p in graph.producers(task))


def _trailing_accepts(graph: TaskGraph, task: Task) -> int:
    """How many verdicts at the end of the guard accept a drafted step."""
    count = 0
    for literal in reversed(task.guard):
        if literal.verdict is not Verdict.ACCEPT or not reads_draft(graph, literal.verify):
            break
        count += 1
    return count


@dataclass(frozen=True)
class PrefetchAhead:
    """Prefetch the target's step also after drafted steps whose verdicts are open, up to `depth` of them."""

    depth: int = 1

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Let prefetched REFINE tasks run ahead of the accepts before their own verdict."""

        def run_ahead(task: Task) -> Task:
            if task.op is not Op.REFINE or not task.ahead:
                return task
            before = replace(task, guard=task.guard[:-1])
            return replace(task, ahead=max(task.ahead, 1 + min(self.depth, _trailing_accepts(graph, before))))

        return replace(graph, tasks=tuple(map(run_ahead, graph.tasks)))


@dataclass(frozen=True)
class EarlyNext:
    """Go on from a refined step before its own verdict, as far as the graph goes on from one whose verdict is known."""

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Add the accept of a refined step to the open verdicts where they begin right after it."""

        def run_ahead(task: Task) -> Task:
            if task.op not in (Op.DRAFT, Op.VERIFY, Op.REFINE) or not task.waits_for:
                return task
            last = task.waits_for[-1]
            refined = last.verdict is Verdict.ACCEPT and not reads_draft(graph, last.verify)
            if not refined or (task.op is Op.VERIFY and not reads_draft(graph, task.id)):
                return task
            if task.op is Op.REFINE and not task.ahead:
                return task
            return replace(task, ahead=task.ahead + 1)

        return replace(graph, tasks=tuple(map(run_ahead, graph.tasks)))


@dataclass(frozen=True)
class PrefetchAlternative:
    """Write the alternative of a backtrack while the refined step is still being verified."""

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Let BACKTRACK tasks run ahead of the verdict on the refined step."""

        def run_ahead(task: Task) -> Task:
            alternative = task.op is Op.BACKTRACK and task.guard
            return replace(task, ahead=max(task.ahead, 1)) if alternative else task

        return replace(graph, tasks=tuple(map(run_ahead, graph.tasks)))


@dataclass(frozen=True)
class BatchVerify:
    """Let one pass of the verifier score several drafted steps: it costs about the same for one step as for three."""

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Let a VERIFY that may run ahead of the accept of the draft before join that one's pass."""

        def join(task: Task) -> Task:
            if task.op is not Op.VERIFY or not task.ahead or not reads_draft(graph, task.id):
                return task
            last = task.guard[-1]
            follows = last.verdict is Verdict.ACCEPT and reads_draft(graph, last.verify)
            return replace(task, joins=last.verify) if follows else task

        return replace(graph, tasks=tuple(map(join, graph.tasks)))


@dataclass(frozen=True)
class ShadowSync:
    """Draft and verifier read the target's step while it is written, and not when they need it."""

    roles: tuple[RoleName, ...] = (RoleName.DRAFT, RoleName.PRM)
    ahead: bool = False
    """Whether they may read as far ahead of verdicts as the step may be written."""

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Add a SYNC on a STREAM edge for each step of the target and each role that reads it later."""
        if not any(t.op in (Op.DRAFT, Op.VERIFY) for t in graph.tasks):
            return graph
        tasks, edges = list(graph.tasks), list(graph.edges)
        roles = [r for r in self.roles if any(t.role is r for t in graph.tasks)]
        for writer in graph.tasks:
            if writer.op not in (Op.REFINE, Op.BACKTRACK) or not writer.guard:
                continue
            for role in roles:
                readers = [t.id for t in _readers(graph, writer, role)]
                if readers and f"sync.{role}.{writer.id}" not in graph.by_id:
                    _add_sync(graph, tasks, edges, writer, role, readers, writer.ahead if self.ahead else 0)
        return _in_order(replace(graph, tasks=tuple(tasks), edges=tuple(edges)))


def _in_order(graph: TaskGraph) -> TaskGraph:
    """The graph with its edges in the order of the tasks that they lead to, as in its text form."""
    position = {t.id: i for i, t in enumerate(graph.tasks)}
    return replace(graph, edges=tuple(sorted(graph.edges, key=lambda e: position[e.target])))


def _readers(graph: TaskGraph, writer: Task, role: RoleName) -> list[Task]:
    """The tasks of a role that are the first to read a step of the target; none if a SYNC has done so."""
    after = graph.consumers(writer.id)
    found = [t for t in after if t.role is role and t.op in (Op.DRAFT, Op.VERIFY)]
    if role is RoleName.PRM and not found:
        # A refined step that is not scored is read with the draft after it.
        drafts = [t for t in after if t.op is Op.DRAFT]
        found = [t for d in drafts for t in graph.consumers(d.id) if t.op is Op.VERIFY]
    elif role is RoleName.DRAFT and not found:
        # The draft after an alternative waits for the score of it.
        found = [t for v in after if v.op is Op.VERIFY for t in graph.consumers(v.id) if t.op is Op.DRAFT]
    mine = (t for t in found if t.role is role and t.tokens_in >= writer.tokens_out)
    return [t for t in mine if set(writer.guard) <= set(t.guard)]


def _add_sync(
    graph: TaskGraph, tasks: list[Task], edges: list[Edge], writer: Task, role: RoleName, readers: list[str], ahead: int
) -> None:
    """Put the SYNC before its first reader, and take from the readers what it reads."""
    size = writer.tokens_out
    before = writer.context + writer.tokens_in
    name = f"sync.{role}.{writer.id}"
    sync = Task(name, Op.SYNC, role, writer.round, size, context=before, guard=writer.guard, ahead=ahead)
    first = min(i for i, t in enumerate(tasks) if t.id in readers)
    for i, task in enumerate(tasks):
        if task.id in readers:
            # A score needs a pass, if only over the last token.
            left = max(task.tokens_in - size, int(task.op is Op.VERIFY))
            tasks[i] = replace(task, tokens_in=left, context=task.context + task.tokens_in - left)
    tasks.insert(first, sync)
    prompt = f"prefill.{role}"
    edges += [Edge(prompt, sync.id)] if prompt in graph.by_id else []
    edges += [Edge(writer.id, sync.id, EdgeKind.STREAM), *(Edge(sync.id, reader) for reader in readers)]


@dataclass(frozen=True)
class DisaggregatePrefill:
    """Read a role's prompt on another device, and move the cache to the role's own."""

    role: RoleName = RoleName.DRAFT

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Put a TRANSFER of the prompt's cache between the role's PREFILL and what follows it."""
        prompt, move = f"prefill.{self.role}", f"transfer.{self.role}"
        if prompt not in graph.by_id or move in graph.by_id:
            return graph
        read = graph.by_id[prompt]
        transfer = replace(read, id=move, op=Op.TRANSFER)
        place = graph.tasks.index(read) + 1
        edges = tuple(replace(e, source=move) if e.source == prompt else e for e in graph.edges)
        tasks = (*graph.tasks[:place], transfer, *graph.tasks[place:])
        return _in_order(replace(graph, tasks=tasks, edges=(*edges, Edge(prompt, move))))


@dataclass(frozen=True)
class Prune:
    """Cut the window short where an outcome is less likely than `below`: what follows is not looked at.

    The outcomes stay in the expectation, with their whole probability, with fewer rounds. `TaskGraph.cut` says how
    much of the probability that is.
    """

    below: float = 0.01

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Drop each round, but the first, that begins with less than that; a steady window keeps its first step."""
        begin = {Op.DRAFT} if any(t.op is Op.DRAFT for t in graph.tasks) else set(WRITES)
        rare = [t for t in graph.tasks if t.op in begin and t.round and graph.chance(t.guard) < self.below]
        closing = {t.id for t in rare if graph.steady and not any(_lies_below(t, r) for r in rare)}
        dropped = {t.id for t in graph.tasks if any(_lies_below(t, r) or t.id == r.id for r in rare)} - closing
        dropped |= {t.id for t in graph.tasks if any(l.verify in dropped for l in t.guard)}
        shortened = [t.guard for t in rare if t.round < graph.rounds]
        cut = sum(p for o, p in graph.outcomes if any(holds(guard, o) for guard in shortened))
        tasks = tuple(t for t in graph.tasks if t.id not in dropped)
        edges = tuple(e for e in graph.edges if not {e.source, e.target} & dropped)
        return replace(graph, tasks=tasks, edges=edges, cut=max(graph.cut, cut))


def _lies_below(task: Task, first: Task) -> bool:
    """Whether a task belongs to the round that `first` begins, or to one after it on the same branch."""
    begun: Guard = first.guard
    return task.id != first.id and task.guard[: len(begun)] == begun and task.round >= first.round


@dataclass(frozen=True)
class OneAtATime:
    """Run device after device: no task, prefill included, begins before the one before it is over."""

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Chain the prefills before the first step; nothing else of a window without speculation overlaps."""
        prefills = [t.id for t in graph.tasks if t.op is Op.PREFILL]
        first = next(t.id for t in graph.tasks if t.op is not Op.PREFILL)
        chain = pairwise([*prefills, first])
        new = tuple(Edge(a, b) for a, b in chain if Edge(a, b) not in graph.edges)
        return replace(graph, edges=graph.edges + new)


def run_passes(graph: TaskGraph, passes: Iterable[Pass]) -> TaskGraph:
    """Apply the passes in turn; the graph is verified after each."""
    for change in passes:
        graph = verify(change(graph))
    return graph
