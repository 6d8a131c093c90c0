"""TaskGraph -> TaskGraph: what may be speculative. A pass is a frozen dataclass; its fields are its options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from planner.graph import Edge, Op, Task, TaskGraph, Verdict, verify


class Pass(Protocol):
    """A change of the graph that leaves its outcomes, and what is used in each of them, as they are."""

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
