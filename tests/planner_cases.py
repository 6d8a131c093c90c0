"""Machines, costs, workflows, random graphs and small backends that the tests of the planner share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from planner.cost import CostOp, Origin
from planner.errors import UserError
from planner.graph import ROLE_OF, WRITES, Edge, EdgeKind, Guard, Literal, Op, Task, TaskGraph, Verdict, verify
from planner.machine import Device, DeviceKind, Link, Machine, Transport
from planner.plan import Plan
from planner.policy import Node, Step
from planner.presets import preset
from planner.problems.base import Problem
from planner.runtime.backend import Handed, ModelInfo, Output, Work, one_by_one
from planner.runtime.engine import Engine
from planner.runtime.session import Solved
from planner.runtime.worker import VirtualWorkers, modelled
from planner.schedule.instance import Instance
from planner.shape import ModelShape
from planner.trace import Event
from planner.workflow import (
    NEEDED_ROLES,
    Arithmetic,
    Budget,
    Numerics,
    Policy,
    PolicyOptions,
    Role,
    RoleName,
    Sampling,
    Statistics,
    Workflow,
)

DRAFT, PRM, TARGET = RoleName.DRAFT, RoleName.PRM, RoleName.TARGET
MODELS = dict.fromkeys(RoleName, "00")

# --- machines and costs -------------------------------------------------------------------------------------------


def device(name: str, kind: DeviceKind = DeviceKind.CPU, **more: Any) -> Device:
    """A device that computes everything."""
    transport = Transport.EMULATE if kind is DeviceKind.FPGA else None
    arithmetics = [Arithmetic.INT8] if kind is DeviceKind.FPGA else list(Arithmetic)
    figures: dict[str, Any] = {
        "backend": "fake",
        "memory_bytes": 1 << 30,
        "bandwidth_bytes_per_s": 1e9,
        "ops_per_s": dict.fromkeys(arithmetics, 1e12),
        "active_w": 10.0,
        "idle_w": 1.0,
        "source": "made up",
    }
    return Device(name=name, kind=kind, transport=transport, **figures | more)


def machine(*devices: Device, latency_us: float = 5.0) -> Machine:
    """A machine whose devices talk over the host."""
    links = tuple(Link(d.name, "host", 1e9, latency_us, "made up") for d in devices)
    return Machine("test", devices, "made up", links)


APART = {DRAFT: "a", PRM: "b", TARGET: "c"}
"""Each role on a device of `THREE` of its own."""
THREE = machine(device("a"), device("b"), device("c"))
MIXED = machine(device("fpga", DeviceKind.FPGA), device("gpu0", DeviceKind.GPU), device("gpu1", DeviceKind.GPU))


@dataclass(frozen=True)
class LinearCosts:
    """So many microseconds a token, by role and device; reading takes a tenth of writing."""

    token_us: Mapping[tuple[RoleName, str], int] = field(default_factory=dict)
    otherwise_us: int = 20

    @property
    def shapes(self) -> Mapping[RoleName, ModelShape]:
        """Small models."""
        return dict.fromkeys(RoleName, ModelShape(1000, 10, 1000))

    def prefill_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """See `Costs`."""
        return max(1, self._us(role, device) * tokens // 10)

    def decode_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """See `Costs`."""
        return max(1, self._us(role, device) * tokens)

    def origin(self, role: RoleName, device: str, op: CostOp) -> Origin:
        """See `Costs`."""
        return Origin.MEASURED

    def _us(self, role: RoleName, device: str) -> int:
        return self.token_us.get((role, device), self.otherwise_us)


# --- workflows ----------------------------------------------------------------------------------------------------


def workflow(kind: Policy = Policy.BACKTRACK, **more: Any) -> Workflow:
    """A workflow of integer draft and float verifier and target. Fields of PolicyOptions may be given as well."""
    options = {"score_prompt": "b"} | {f.name: more.pop(f.name) for f in fields(PolicyOptions) if f.name in more}
    roles = {r: Role("made/up", Numerics(Arithmetic.INT8 if r is DRAFT else Arithmetic.FLOAT32)) for r in RoleName}
    return Workflow("test", "letters", roles, policy=PolicyOptions(kind, **options), **more)


@st.composite
def workflows(draw: st.DrawFn) -> Workflow:
    """Every policy, with small budgets and any thresholds."""
    share = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0])
    temperature = draw(st.sampled_from([0.0, 1.0]))
    # Greedy drafts of a step, and greedy runs of a problem, are all the same: a workflow may not ask for several.
    most = 3 if temperature else 1
    return workflow(
        draw(st.sampled_from(list(Policy))),
        accept=draw(share),
        accept_refined=draw(share),
        max_backtracks=draw(st.integers(0, 4)),
        max_ancestors=draw(st.integers(0, 4)),
        first_target_steps=draw(st.integers(0, 2)),
        drafts=draw(st.integers(1, most)),
        resample_alternatives=draw(st.integers(0, 2)),
        vote=draw(st.integers(1, min(2, most))),
        sampling=Sampling(temperature, draw(st.integers(0, 1000))),
        budget=Budget(draw(st.integers(1, 6)), draw(st.integers(5, 60)), draw(st.integers(1, 20))),
        statistics=Statistics(
            accept=draw(share),
            accept_refined=draw(share),
            prompt_tokens=draw(st.integers(1, 12)),
            draft_step_tokens=draw(st.integers(1, 20)),
            target_step_tokens=draw(st.integers(1, 20)),
            steps=draw(st.integers(1, 5)),
            draft_step_spread=draw(st.sampled_from([0.0, 0.3, 2.0])),
            steps_spread=draw(st.sampled_from([0.0, 0.5])),
            persistence=draw(share),
        ),
    )


# --- graphs -------------------------------------------------------------------------------------------------------


def joined(a: Guard, b: Guard) -> Guard | None:
    """Both guards; None if they contradict each other."""
    both = tuple(dict.fromkeys(a + b))
    return both if len({l.verify for l in both}) == len(both) else None


def graphs(most: int = 9, streams: bool = False) -> st.SearchStrategy[TaskGraph]:
    """Legal conditional graphs that no workflow need lower to: guards that join, verdicts that nothing hangs on.

    Drawn from a seed, for speed; a failure shrinks to the fewest tasks.
    """
    return st.builds(lambda size, seed: random_graph(Random(seed), size, streams), st.integers(1, most), SEEDS)


SEEDS = st.integers(0, 2**32 - 1)


def random_graph(random: Random, size: int, streams: bool = False) -> TaskGraph:
    """One of `graphs`."""
    rounds = random.randint(1, 3)
    tasks: list[Task] = []
    edges: list[Edge] = []
    guards: list[Guard] = [()]
    for number in range(size):
        guard = random.choice(guards[-3:] if random.random() < 0.7 else guards)
        if random.random() < 0.5:
            guard = joined(guard, random.choice(guards)) or guard
        able = [t for t in tasks if set(t.guard) <= set(guard)]
        written = [t for t in able if t.op in WRITES]
        op = random.choice([o for o in Op if o is not Op.VERIFY] + [Op.VERIFY] * 6 * bool(written))
        needs = set(random.sample(able, min(len(able), random.randint(0, 2))))
        if op is Op.VERIFY:
            needs.add(random.choice(written))
        verdicts = sum(t.accept is not None for t in tasks)
        accept = None
        if op is Op.VERIFY and verdicts < 4 and random.random() < 0.8:
            accept = random.choice([0.0, 1.0, 0.5, 1e-5, random.random(), random.random()])
        name = f"{op.value.lower()}.{number}"
        tasks.append(
            Task(
                name,
                op,
                random.choice(ROLE_OF[op]),
                random.randrange(rounds),
                random.randint(0, 40),
                random.randint(1, 40) if op in WRITES else 0,
                random.randint(0, 99),
                guard,
                random.randint(0, len(guard)),
                accept,
            )
        )
        kinds = list(EdgeKind) if streams else [EdgeKind.DATA]
        edges += [Edge(t.id, name, random.choice(kinds)) for t in sorted(needs, key=lambda t: t.id)]
        if accept is not None:
            guards += [(*guard, Literal(name, verdict)) for verdict in Verdict]
    return verify(TaskGraph(rounds, tuple(tasks), tuple(edges)))


def instances(most: int = 9, longest_us: int = 40, most_devices: int = 3) -> st.SearchStrategy[Instance]:
    """Random graphs with durations, delays and placements that follow no cost model."""
    sizes = st.integers(1, most), st.integers(1, most_devices)
    return st.builds(lambda n, d, seed: random_instance(Random(seed), n, d, longest_us), *sizes, SEEDS)


def random_instance(random: Random, size: int, devices: int, longest_us: int) -> Instance:
    """One of `instances`."""
    graph = random_graph(random, size)
    names = tuple("abc"[:devices])
    roles = [r for r in RoleName if any(t.role is r for t in graph.tasks)]
    every = [dict(zip(roles, chosen, strict=True)) for chosen in product(names, repeat=len(roles))]
    return Instance(
        graph,
        names,
        {(t.id, d): random.randint(1, longest_us) for t in graph.tasks for d in names},
        {(a, b): 0 if a == b else random.randint(0, longest_us // 4) for a in names for b in names},
        {(r, d): random.randint(1, max(1, longest_us // 5)) for r in roles for d in names},
        tuple(random.sample(every, random.randint(1, min(4, len(every))))),
    )


# --- plans --------------------------------------------------------------------------------------------------------


def plan_for(flow: Workflow, name: str = "serial", on: Machine = THREE, costs: Any = None, **more: Any) -> Plan:
    """A preset's plan, with some fields replaced."""
    return replace(preset(name, flow, on, costs or LinearCosts(), MODELS, rounds=2), **more)


@cache
def _base(kind: Policy, name: str, numbered: int) -> Plan:
    return plan_for(workflow(kind), name, (THREE, MIXED)[numbered])


def quick_plan(flow: Workflow, name: str = "serial", on: Machine = THREE, **more: Any) -> Plan:
    """As `plan_for`, with the timeline of another workflow: enough for whoever follows the plan alone."""
    return replace(_base(flow.policy.kind, name, int(on is MIXED)), workflow=flow, **more)


KINDS = [f"{op}@{round}" for op in Op for round in range(4)]


def plans(flow: Workflow, on: Machine = THREE) -> st.SearchStrategy[Plan]:
    """Plans that no planner would make: any placement, depth, chunk and order."""
    return SEEDS.map(lambda seed: random_plan(Random(seed), flow, on))


def random_plan(random: Random, flow: Workflow, on: Machine = THREE) -> Plan:
    """One of `plans`."""
    names = [d.name for d in on.devices]
    placement = {r: random.choice(names) for r in NEEDED_ROLES[flow.policy.kind]}
    elsewhere = [name for name in names if name != placement.get(DRAFT)]
    return quick_plan(
        flow,
        on=on,
        placement=placement,
        draft_ahead=random.randint(0, 3),
        prefetch_refine=random.random() < 0.6,
        prefetch_ahead=random.randint(0, 2),
        early_next=random.random() < 0.5,
        batch_verify=random.random() < 0.5,
        alternatives=random.random() < 0.5,
        shadow_sync=random.random() < 0.5,
        chunk_tokens=random.randint(1, 12),
        priorities={d: tuple(random.sample(KINDS, random.randint(0, len(KINDS)))) for d in names},
        sync_ahead=random.random() < 0.5,
        prefill_on={DRAFT: random.choice(elsewhere)} if DRAFT in placement and random.random() < 0.4 else {},
    )


def plan_anew(on: Machine, flow: Workflow, ratios: Mapping[tuple[RoleName, str], float]) -> Plan:
    """Everything on one device: the one whose work is nearest to what the cost model says."""
    best = min("abc", key=lambda d: max((r for (_, at), r in ratios.items() if at == d), default=1.0))
    return replace(quick_plan(flow, "serial"), name="anew", placement=dict.fromkeys(APART, best))


def plan_when_told(told: Path, on: Machine, flow: Workflow, ratios: Mapping[tuple[RoleName, str], float]) -> Plan:
    """As `plan_anew`, once a file is there: a plan that takes as long as a test wants."""
    until = time.monotonic() + 120
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return plan_anew(on, flow, ratios)


def plan_nothing(on: Machine, flow: Workflow, ratios: Mapping[tuple[RoleName, str], float]) -> Plan:
    """There is no plan."""
    raise UserError("there is none")


# --- a small world that steps are made of letters in --------------------------------------------------------------

END = "."
LETTERS = "abc" + END
"""What steps are written with."""


class Letters:
    """A problem set: a step that begins with `a` and has another letter is the answer."""

    name = "letters"
    delimiter = END

    def generate(self, count: int, seed: int) -> list[Problem]:
        return [Problem(self.name, "abc"[n % 3] * (n + 1), "b") for n in range(count)]

    def parse(self, question: str) -> Problem:
        return Problem(self.name, question, "b")

    def prompt(self, problem: Problem) -> str:
        return problem.question + END

    def readable(self, step: str) -> str:
        return step.upper()

    def answer(self, step: str) -> str | None:
        return step[1:] if step.startswith("aa") else None

    def grade(self, problem: Problem, steps: Sequence[str]) -> bool:
        return bool(steps) and self.answer(steps[-1]) == problem.answer


@dataclass
class LetterBackend:
    """Writes and scores by a hash of all that is in the cache, so that one wrong token changes what follows.

    `vocabularies` are the letters of each role in the order of their ids; pairs of letters may be tokens too.
    """

    vocabularies: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict.fromkeys(RoleName, LETTERS))
    context_tokens: int = 500
    batches: bool = True
    held: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    log: list[Work] = field(default_factory=list)

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        return ModelInfo("00", str(self.vocabularies[RoleName(name)]), 0, 1, self.context_tokens, self.batches)

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        words = sorted(self.vocabularies[RoleName(name)], key=len, reverse=True)
        tokens = []
        while text:
            word = next(w for w in words if text.startswith(w))
            tokens.append(list(self.vocabularies[RoleName(name)]).index(word))
            text = text[len(word) :]
        return tuple(tokens)

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        return self.encode(name, text)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        return "".join(self.vocabularies[RoleName(name)][t] for t in tokens)

    def run(self, work: Work) -> Output:
        if work.beside:
            return one_by_one(work, self.run, partial(self.fork, work.role), partial(self.rewind, work.role))
        self.log.append(work)
        held = self.held.setdefault((work.role, work.sequence), [])
        if work.keep > len(held):
            raise ValueError(f"{work.role} holds {len(held)} tokens, not {work.keep}")
        self.cut(held, work)
        held += work.feed
        if work.score:
            return Output(scores=tuple(self.score(work, held[: at + 1]) for at in work.score))
        written: list[int] = []
        while len(written) < work.max_new:
            written.append(self.write(work, held))
            held.append(written[-1])
            if END in self.vocabularies[RoleName(work.role)][written[-1]]:
                return Output(tuple(written), complete=True)
        return Output(tuple(written))

    def cut(self, held: list[int], work: Work) -> None:
        """Rewind; a broken backend does otherwise."""
        del held[work.keep :]

    def write(self, work: Work, held: Sequence[int]) -> int:
        """The next token."""
        return draw_number(work.role, held, work.key) % len(self.vocabularies[RoleName(work.role)])

    def score(self, work: Work, held: Sequence[int]) -> float:
        """Anything from 0 to 1."""
        return draw_number(work.role, held, work.ask) % 10_001 / 10_000

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        del self.held[name, sequence][tokens:]

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        self.held[name, new_sequence] = list(self.held[name, sequence])

    def hand_over(self, name: str, sequence: str) -> Handed:
        held = self.held[name, sequence]
        return Handed(tuple(held), bytes(held))

    def take_over(self, name: str, sequence: str, handed: Handed) -> None:
        self.held[name, sequence] = list(handed.rows)

    def unload(self, name: str) -> None:
        self.held = {key: held for key, held in self.held.items() if key[0] != name}

    def close(self) -> None:
        self.held.clear()


def draw_number(*of: object) -> int:
    """A number that looks random."""
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "big")


def run_letters(
    plan: Plan,
    questions: Sequence[str] = ("a", "bc"),
    make: Callable[[], LetterBackend] = LetterBackend,
    costs: Any = None,
) -> tuple[list[Solved], list[Event]]:
    """Run a plan on the letters, each device with a backend of its own."""
    events: list[Event] = []
    backends = {d.name: make() for d in plan.machine.devices}
    workers = VirtualWorkers(modelled(costs or LinearCosts()), backends)
    problems = Letters()
    engine = Engine(plan, workers, problems, events.append)
    return [engine.solve(problems.parse(q)) for q in questions], events


def committed(solved: Sequence[Solved]) -> list[tuple[str, str | None, tuple[Step, ...]]]:
    """What must not depend on the plan."""
    return [(s.outcome.status.value, s.answer, tuple(s.outcome.node.path)) for s in solved]


# --- hand-written results for policies ----------------------------------------------------------------------------


def step(text: str, source: RoleName = DRAFT, tokens: int | None = None, ended: bool = False) -> Step:
    """A step of so many tokens, by default one a letter."""
    return Step(text, tuple(range(len(text) if tokens is None else tokens)), source, ended)


ROOT = Node(None, None, "root")


def install_backend(folder: Path, module: str) -> None:
    """Register a module's `Backend` as the backend `fake`, for processes that have the folder on their path."""
    info = folder / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[heteroreason.backends]\nfake = {module}:Backend\n")
