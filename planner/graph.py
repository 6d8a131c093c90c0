"""The task graph of a window: tasks, guards, edges, the rules that make it legal, and its text form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import networkx as nx

from planner.errors import UserError
from planner.workflow import RoleName


class Op(StrEnum):
    """What a task does."""

    PREFILL = "PREFILL"
    DRAFT = "DRAFT"
    VERIFY = "VERIFY"
    REFINE = "REFINE"
    BACKTRACK = "BACKTRACK"
    SYNC = "SYNC"
    TRANSFER = "TRANSFER"


class Verdict(StrEnum):
    """What a VERIFY task finds."""

    ACCEPT = "accept"
    REJECT = "reject"


class EdgeKind(StrEnum):
    """DATA: finish to start. STREAM: may run while the producer runs, ends after it."""

    DATA = "data"
    STREAM = "stream"


@dataclass(frozen=True, order=True)
class Literal:
    """One condition of a guard: the VERIFY task `verify` found `verdict`."""

    verify: str
    verdict: Verdict


Guard = tuple[Literal, ...]
"""The verdicts under which a task's result is used, earliest first. Empty: always."""

Outcome = Mapping[str, Verdict]
"""One way a window can turn out: the verdict of each VERIFY task that ran in it."""


@dataclass(frozen=True)
class Task:
    """A node of the graph."""

    id: str
    op: Op
    role: RoleName
    round: int
    """Relative step: 0 is the first step of the window."""
    tokens_in: int = 0
    """Tokens read that the role's cache does not hold yet."""
    tokens_out: int = 0
    """Tokens written."""
    context: int = 0
    """Tokens already in the cache."""
    guard: Guard = ()
    ahead: int = 0
    """How many of the last verdicts of its guard may still be unknown when it starts."""
    accept: float | None = None
    """VERIFY only: probability of ACCEPT; None if no task depends on the verdict."""
    joins: str = ""
    """VERIFY only: the VERIFY of the step before, whose pass may score this step as well."""

    @property
    def waits_for(self) -> Guard:
        """The part of the guard that has to be known before the task starts."""
        return self.guard[: len(self.guard) - self.ahead]

    @property
    def speculative(self) -> bool:
        """Whether it may start before its guard is known."""
        return self.ahead > 0


@dataclass(frozen=True)
class Edge:
    """`target` needs the tokens of `source`."""

    source: str
    target: str
    kind: EdgeKind = EdgeKind.DATA


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of a window of `rounds` steps, in an order in which each follows what it needs."""

    rounds: int
    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    steady: bool = False
    """A window amid a problem: prompts are read, and each outcome ends with the first step of the next window."""
    cut: float = 0.0
    """Probability of the outcomes that a pass has cut short of the window's rounds."""

    @cached_property
    def by_id(self) -> Mapping[str, Task]:
        """Tasks by their id."""
        return {t.id: t for t in self.tasks}

    @cached_property
    def digraph(self) -> nx.DiGraph:
        """The data edges as a networkx graph; nodes carry `task`, edges `kind`."""
        graph = nx.DiGraph()
        for task in self.tasks:
            graph.add_node(task.id, task=task)
        for edge in self.edges:
            graph.add_edge(edge.source, edge.target, kind=edge.kind)
        return graph

    @cached_property
    def order_graph(self) -> nx.DiGraph:
        """Data edges and, for every literal of a guard, an edge from its VERIFY task (`kind` "guard")."""
        graph = self.digraph.copy()
        for task in self.tasks:
            for literal in task.guard:
                if not graph.has_edge(literal.verify, task.id):
                    graph.add_edge(literal.verify, task.id, kind="guard")
        return graph

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Task ids so that each follows its producers and the verdicts of its guard."""
        position = {t.id: i for i, t in enumerate(self.tasks)}
        return tuple(nx.lexicographical_topological_sort(self.order_graph, key=position.__getitem__))

    def producers(self, task: str) -> list[Task]:
        """The tasks whose tokens `task` needs."""
        return [self.by_id[p] for p in self.digraph.predecessors(task)]

    def consumers(self, task: str) -> list[Task]:
        """The tasks that need the tokens of `task`."""
        return [self.by_id[c] for c in self.digraph.successors(task)]

    @cached_property
    def head(self) -> str | None:
        """The step that a steady window begins with: its time counts from the end of that one."""
        return next((t.id for t in self.tasks if t.op in WRITES and not t.guard), None) if self.steady else None

    def chance(self, guard: Guard) -> float:
        """The probability that a guard holds."""
        return sum(p for outcome, p in self.outcomes if holds(guard, outcome))

    @cached_property
    def outcomes(self) -> tuple[tuple[Outcome, float], ...]:
        """Every outcome of the window with its probability; the probabilities add up to 1."""
        return tuple(_outcomes(self, {}, 1.0))


def holds(guard: Guard, outcome: Outcome) -> bool:
    """Whether all of the guard's verdicts are the outcome's."""
    return all(outcome.get(l.verify) == l.verdict for l in guard)


def broken_by(guard: Guard, outcome: Outcome) -> list[str]:
    """The VERIFY tasks that ran in the outcome and found otherwise than the guard asks."""
    return [l.verify for l in guard if outcome.get(l.verify, l.verdict) != l.verdict]


def _outcomes(graph: TaskGraph, known: dict[str, Verdict], p: float) -> Iterator[tuple[Outcome, float]]:
    for task in graph.tasks:
        if task.accept is not None and task.id not in known and holds(task.guard, known):
            for verdict, share in ((Verdict.ACCEPT, task.accept), (Verdict.REJECT, 1.0 - task.accept)):
                if share > 0.0:
                    yield from _outcomes(graph, {**known, task.id: verdict}, p * share)
            return
    yield known, p


# --- legality -----------------------------------------------------------------------------------------------------

ROLE_OF: Mapping[Op, tuple[RoleName, ...]] = {
    Op.PREFILL: tuple(RoleName),
    Op.DRAFT: (RoleName.DRAFT,),
    Op.VERIFY: (RoleName.PRM, RoleName.TARGET),
    Op.REFINE: (RoleName.TARGET,),
    Op.BACKTRACK: (RoleName.TARGET,),
    Op.SYNC: tuple(RoleName),
    Op.TRANSFER: tuple(RoleName),
}
WRITES = (Op.DRAFT, Op.REFINE, Op.BACKTRACK)


@dataclass(frozen=True)
class Rule:
    """One rule: `broken(graph, task)` is true where the task breaks it."""

    name: str
    text: str
    broken: Callable[[TaskGraph, Task], bool]


def _unclosed(graph: TaskGraph, task: Task) -> bool:
    # In order, so that the verdicts that a task waits for are closed as well, whatever it runs ahead of.
    known = [(i, graph.by_id[l.verify].guard) for i, l in enumerate(task.guard) if l.verify in graph.by_id]
    return any(set(guard) - set(task.guard[:i]) for i, guard in known)


def _guard_of_unknown(graph: TaskGraph, task: Task) -> bool:
    return any(
        l.verify not in graph.by_id or graph.by_id[l.verify].accept is None or l.verify == task.id for l in task.guard
    )


def _contradicts(graph: TaskGraph, task: Task) -> bool:
    return len({l.verify for l in task.guard}) < len(task.guard)


def _uses_unused(graph: TaskGraph, task: Task) -> bool:
    # A producer under a condition that the consumer does not share would sometimes not exist.
    return any(set(p.guard) - set(task.guard) for p in graph.producers(task.id))


def _outside(graph: TaskGraph, task: Task) -> bool:
    closes = graph.steady and task.op in WRITES
    return not 0 <= task.round < graph.rounds + closes


def _joins_wrongly(graph: TaskGraph, task: Task) -> bool:
    if not task.joins:
        return False
    before = graph.by_id.get(task.joins)
    follows = before is not None and task.guard == (*before.guard, Literal(before.id, Verdict.ACCEPT))
    alone = all(t.joins != task.joins for t in graph.tasks if t is not task)
    return not (follows and task.op is Op.VERIFY and task.ahead > 0 and alone)


def _no_head(graph: TaskGraph, task: Task) -> bool:
    # The head begins at once, so it can wait for nothing.
    return graph.steady and (graph.head is None or (task.id == graph.head and bool(graph.producers(task.id))))


_ID = r"[\w.:-]+"

RULES: tuple[Rule, ...] = (
    Rule("id", "an id is letters, digits, dots, colons and hyphens", lambda g, t: not re.fullmatch(_ID, t.id)),
    Rule("role", "an op runs on its own role", lambda g, t: t.role not in ROLE_OF[t.op]),
    Rule("round", "the round lies in the window, or its step closes a steady one", _outside),
    Rule("tokens", "token counts are not negative", lambda g, t: min(t.tokens_in, t.tokens_out, t.context) < 0),
    Rule("writes", "only a step's writer writes tokens", lambda g, t: (t.tokens_out > 0) != (t.op in WRITES)),
    Rule("verdict", "only VERIFY has a verdict", lambda g, t: t.accept is not None and t.op is not Op.VERIFY),
    Rule("chance", "a probability lies in 0..1", lambda g, t: t.accept is not None and not 0 <= t.accept <= 1),
    Rule("guard-known", "a guard names VERIFY tasks of the graph that have a verdict", _guard_of_unknown),
    Rule("guard-once", "a guard names a VERIFY task once", _contradicts),
    Rule("guard-closed", "the guard of a verdict stands before it in a guard", _unclosed),
    Rule("producer", "a task's producers run wherever it is used", _uses_unused),
    Rule(
        "verified",
        "a VERIFY task reads a written step",
        lambda g, t: t.op is Op.VERIFY and not any(p.op in WRITES for p in g.producers(t.id)),
    ),
    Rule("ahead", "a task runs ahead of verdicts of its guard", lambda g, t: not 0 <= t.ahead <= len(t.guard)),
    Rule("joins", "one VERIFY ahead of need joins the one whose accept ends its guard", _joins_wrongly),
    Rule("head", "a steady window begins with a step that needs nothing", _no_head),
)


def verify(graph: TaskGraph) -> TaskGraph:
    """The graph itself if it is legal. Raises UserError that names the task and the rule it breaks."""
    if len(graph.by_id) != len(graph.tasks):
        raise UserError("two tasks have the same id", where="graph", mend="give each task an id of its own")
    for edge in graph.edges:
        for end in (edge.source, edge.target):
            if end not in graph.by_id:
                raise UserError(f"an edge names the unknown task {end!r}", where="graph", mend="name a task of it")
    for task in graph.tasks:
        for rule in RULES:
            if rule.broken(graph, task):
                raise UserError(f"breaks the rule {rule.name!r}", where=f"task {task.id}", mend=f"see that {rule.text}")
    if not nx.is_directed_acyclic_graph(graph.order_graph):
        raise UserError("tasks wait for each other in a circle", where="graph", mend="remove an edge of it")
    return graph


# --- text ---------------------------------------------------------------------------------------------------------

_TASK = re.compile(
    rf"(?P<id>{_ID}) = (?P<op>[A-Z]+) (?P<role>\w+) round=(?P<round>\d+) in=(?P<tin>\d+) out=(?P<tout>\d+)"
    rf" context=(?P<context>\d+)(?: accept=(?P<accept>[0-9.e+-]+))?(?: from (?P<edges>~?{_ID}(?:, ~?{_ID})*))?"
    rf"(?: if (?P<guard>\??!?{_ID}(?: & \??!?{_ID})*))?(?: with (?P<joins>{_ID}))?"
)
_WINDOW = re.compile(r"window rounds=(?P<rounds>\d+)(?P<steady> steady)?(?: cut=(?P<cut>[0-9.e+-]+))?")


def to_text(graph: TaskGraph) -> str:
    """One line a task: `id = OP role round=.. in=.. out=.. context=.. [accept=..] [from a, ~b] [if guard] [with v]`.

    `~b` is a STREAM edge. A literal of the guard is the id of a VERIFY task, with `!` before it for REJECT, and
    with `?` before that where the task may start while the verdict is still unknown. `with v` is `Task.joins`.
    """
    head = f"window rounds={graph.rounds}" + " steady" * graph.steady
    lines = [f"{head} cut={graph.cut!r}" if graph.cut else head]
    incoming: dict[str, list[str]] = {t.id: [] for t in graph.tasks}
    for edge in graph.edges:
        incoming[edge.target].append(("~" if edge.kind is EdgeKind.STREAM else "") + edge.source)
    for t in graph.tasks:
        line = f"{t.id} = {t.op} {t.role} round={t.round} in={t.tokens_in} out={t.tokens_out} context={t.context}"
        if t.accept is not None:
            line += f" accept={t.accept!r}"
        if incoming[t.id]:
            line += " from " + ", ".join(incoming[t.id])
        if t.guard:
            known = len(t.waits_for)
            marks = (
                ("?" if i >= known else "") + ("!" if l.verdict is Verdict.REJECT else "")
                for i, l in enumerate(t.guard)
            )
            line += " if " + " & ".join(mark + l.verify for mark, l in zip(marks, t.guard, strict=True))
        if t.joins:
            line += f" with {t.joins}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def from_text(text: str, where: str = "graph text") -> TaskGraph:
    """The inverse of `to_text`; the result is verified. Blank lines and lines that begin with # are passed over."""
    rows = [(n, row.strip()) for n, row in enumerate(text.splitlines(), 1)]
    rows = [(n, row) for n, row in rows if row and not row.startswith("#")]
    head = _WINDOW.fullmatch(rows[0][1]) if rows else None
    if head is None:
        raise UserError("does not begin with a window", where=where, mend="begin with `window rounds=N`")
    tasks, edges = [], []
    for n, row in rows[1:]:
        match = _TASK.fullmatch(row)
        if match is None:
            raise UserError(f"cannot read {row!r}", where=f"{where}, line {n}", mend="write a task as to_text does")
        try:
            tasks.append(_task_from(match))
        except ValueError as bad:
            raise UserError(str(bad), where=f"{where}, line {n}", mend="write a task as to_text does") from None
        for source in filter(None, (match["edges"] or "").split(", ")):
            kind = EdgeKind.STREAM if source.startswith("~") else EdgeKind.DATA
            edges.append(Edge(source.lstrip("~"), match["id"], kind))
    steady, cut = head["steady"] is not None, _number(head["cut"], where)
    return verify(TaskGraph(int(head["rounds"]), tuple(tasks), tuple(edges), steady, cut))


def _number(text: str | None, where: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        raise UserError(f"cut is {text!r}", where=where, mend="write a number from 0 to 1") from None


def _task_from(match: re.Match[str]) -> Task:
    parts = [part for part in (match["guard"] or "").split(" & ") if part]
    unknown = [part.startswith("?") for part in parts]
    if unknown != sorted(unknown):
        raise ValueError("a verdict without ? follows one with it")
    literals = tuple(
        Literal(part.lstrip("?!"), Verdict.REJECT if part.lstrip("?").startswith("!") else Verdict.ACCEPT)
        for part in parts
    )
    return Task(
        id=match["id"],
        op=Op(match["op"]),
        role=RoleName(match["role"]),
        round=int(match["round"]),
        tokens_in=int(match["tin"]),
        tokens_out=int(match["tout"]),
        context=int(match["context"]),
        guard=literals,
        ahead=sum(unknown),
        accept=None if match["accept"] is None else float(match["accept"]),
        joins=match["joins"] or "",
    )
