"""Plans on the wall clock of this computer, beside their simulation on costs that were measured just before.

Two cores are two devices. Each role is timed on each of them (profile), and runs of a serial plan and of `auto` put
costs right and tell acceptance and lengths (fit). Then plans made anew take turns, so that whatever else the computer
does slows all of them. Each turn has new problems, the same for every plan, and as many short and long ones as the
others. Ratios are medians over the turns, of two plans in the same turn.

What a plan should take is simulated on costs fitted to a run of it in the same turn, on other problems than those that
are measured. On a computer that is shared, a fit of some minutes before would tell how its speed has changed since, not
how well a plan's time is foreseen. How far off it is, too, is the median over the turns.

Two cases have models whose steps take longer: those that ship, in float32, with further layers that add nothing. They
write and score the same at the cost of deeper models.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

from planner import api
from planner.checkpoint import model_folder
from planner.cost import CostTable
from planner.fit import fit_events
from planner.plan import Plan
from planner.problems import problem_set
from planner.problems.base import Problem, ProblemSet
from planner.profile import devices_of, profile
from planner.report import Report, report
from planner.runtime.engine import Engine
from planner.runtime.host import Solved
from planner.simulate import simulate
from planner.trace import ClockKind, Event
from planner.workflow import NEEDED_ROLES, Arithmetic, Policy, RoleName, Workflow

EXAMPLES = Path(__file__).parent.parent / "examples"
MACHINE = "this-computer"
SEED, WARM_SEED, SIMULATION_SEED = 7_000_000, 7_500_000, 1001
WARM = 8
"""Problems that nothing is measured on."""
FIRST = ("serial", "auto")
"""Plans whose runs tell the costs that all are planned by."""
SIMULATED = 1000
FURTHER_LAYERS = {RoleName.DRAFT: 38, RoleName.PRM: 24, RoleName.TARGET: 16}
"""With these a step of the draft takes about 20 ms, one of the target about 40."""
PROFILE_S = 5.0
"""For a role on a device."""


class Contender:
    """A plan whose models stay loaded from turn to turn."""

    def __init__(self, name: str, plan: Plan, stack: ExitStack) -> None:
        """Loads and compiles; what it holds ends with `stack`."""
        self.name, self.plan = name, plan
        self.events: list[Event] = []
        """Those of the problems that were solved last."""
        self.reports: list[Report] = []
        """Of each turn, as the next two."""
        self.foreseen: list[Report] = []
        self.answers: list[tuple[object, ...]] = []
        workers = stack.enter_context(api.open_workers(plan, ClockKind.WALL))
        self._engine = Engine(plan, workers, problem_set(plan.workflow.problems), self.events.append)
        self._head = self.events[0]

    def solve(self, problems: Sequence[Problem]) -> tuple[Solved, ...]:
        """Solve the problems, one after another; `events` then holds what happened."""
        self.events[:] = [self._head]
        return api.in_order(self._engine.solve_all(problems), problems)

    def foresee(self, problems: Sequence[Problem], table: CostTable) -> None:
        """Fit costs to a run on these problems, over those of `table`, and keep what simulation makes of them."""
        self.solve(problems)
        self.foreseen.append(
            foreseen(self.plan, fit_events(self.plan, self.events, f"a run of {self.name}").over(table))
        )

    def turn(self, problems: Sequence[Problem]) -> None:
        """Solve them and keep how long that took."""
        solved = self.solve(problems)
        self.answers.append(tuple((s.outcome.status, s.answer, s.steps) for s in solved))
        self.reports.append(report(self.plan, self.events))

    @property
    def off(self) -> float:
        """How far simulation is off, as a share of what was measured: the median over the turns."""
        return statistics.median(f.mean_us / r.mean_us for f, r in zip(self.foreseen, self.reports, strict=True)) - 1

    def over(self, other: Contender) -> float:
        """How many times as long as this one the other takes: the median over the turns."""
        pairs = zip(other.reports, self.reports, strict=True)
        return statistics.median(a.mean_us / b.mean_us for a, b in pairs)


def deeper(model: str, further: int, folder: Path) -> str:
    """A checkpoint that writes what `model` writes, with further layers whose output is zero."""
    shutil.copytree(model_folder(model), folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers + further
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    weights = load_file(folder / "model.safetensors")
    first = {name: value for name, value in weights.items() if name.startswith("model.layers.0.")}
    for layer in range(layers, layers + further):
        for name, value in first.items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[name.replace(".0.", f".{layer}.", 1)] = np.zeros_like(value) if adds else value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def cases(scratch: Path, problems: int) -> Iterator[tuple[str, Workflow, int]]:
    """Titles, workflows and problems in a turn: with deeper models, which take longer, half as many."""
    for name in ("sums", "countdown"):
        flow = Workflow.load(EXAMPLES / f"{name}.yaml")
        yield f"{name}, the models that ship", flow, problems
        yield f"{name}, deeper models", with_deeper(flow, scratch / name), max(1, problems // 2)


def with_deeper(flow: Workflow, folder: Path) -> Workflow:
    """The workflow with a deeper model in each role."""
    roles = dict(flow.roles)
    for name, further in FURTHER_LAYERS.items():
        numerics = replace(roles[name].numerics, arithmetic=Arithmetic.FLOAT32)
        roles[name] = replace(roles[name], model=deeper(roles[name].model, further, folder / name), numerics=numerics)
    return replace(flow, roles=roles)


def dealt(kinds: ProblemSet, count: int, turns: int) -> list[list[Problem]]:
    """Problems for each of so many turns, of all lengths alike."""
    pool = sorted(kinds.generate(count * turns, SEED), key=lambda problem: len(problem.question))
    return [pool[turn::turns] for turn in range(turns)]


def costs_here(flow: Workflow, problems: Sequence[Problem]) -> CostTable:
    """Costs of the workflow's models on both cores, profiled, then fitted to runs on these problems."""
    machine, kinds = api.as_machine(MACHINE), problem_set(flow.problems)
    roles = {name: flow.roles[name] for name in NEEDED_ROLES[flow.policy.kind]}
    table, _ = profile(machine, devices_of(machine, roles, None), kinds.delimiter, limit_s=PROFILE_S)
    for name in FIRST:
        with ExitStack() as stack:
            seen = Contender(name, api.plan(flow, machine, name, costs=table), stack)
            seen.solve(kinds.generate(WARM, WARM_SEED))
            seen.solve(problems)
        table = fit_events(seen.plan, seen.events, f"a run of {name}").over(table)
    return table


def measured(flow: Workflow, table: CostTable, hands: Sequence[Sequence[Problem]]) -> list[Contender]:
    """The plans after all turns; a turn takes a hand to fit costs to, and one to be measured."""
    kinds = problem_set(flow.problems)
    alone = replace(flow, policy=replace(flow.policy, kind=Policy.TARGET_ONLY))
    plans = {name: api.plan(flow, MACHINE, name, costs=table) for name in ("serial", "overlapped", "auto")}
    plans["target_only"] = api.plan(alone, MACHINE, "serial", costs=table)
    with ExitStack() as stack:
        found = [Contender(name, plan, stack) for name, plan in plans.items()]
        for contender in found:
            contender.solve(kinds.generate(WARM, WARM_SEED))
        for to_fit, to_measure in zip(hands[::2], hands[1::2], strict=True):
            for contender in found:
                if contender.name != "target_only":
                    contender.foresee(to_fit, table)
                contender.turn(to_measure)
    assert len({tuple(c.answers) for c in found if c.name != "target_only"}) == 1, "a plan changed an answer"
    return found


def foreseen(plan: Plan, table: CostTable) -> Report:
    """What simulation says of a plan by these costs and their statistics."""
    assert table.statistics is not None and table.dispatch_us is not None, "the costs are not of a run"
    flow = replace(plan.workflow, statistics=table.statistics)
    machine = replace(plan.machine, dispatch_us=table.dispatch_us)
    costs = api.costs_of(flow, machine, table)
    return simulate(replace(plan, workflow=flow, machine=machine), costs, SIMULATED, SIMULATION_SEED)


def show(title: str, found: Sequence[Contender]) -> None:
    """One table."""
    table = Table(title=title, title_justify="left")
    columns = (
        "plan",
        "ms a problem",
        "simulated",
        "off by",
        "serial / this",
        "simulated",
        "share of it",
        "solved",
        "work",
    )
    for column in columns:
        table.add_column(column)
    serial = next(c for c in found if c.name == "serial")
    for c in found:
        ms = statistics.median(r.mean_us for r in c.reports) / 1e3
        ratio, row = c.over(serial), [c.name, f"{ms:.2f}"]
        if c.foreseen:
            said = statistics.median(a.mean_us / b.mean_us for a, b in zip(serial.foreseen, c.foreseen, strict=True))
            row += [f"{statistics.median(r.mean_us for r in c.foreseen) / 1e3:.2f}", f"{c.off:+.0%}"]
            row += [f"{ratio:.2f}", f"{said:.2f}", f"{ratio / said:.0%}"]
        else:
            row += ["", "", f"{ratio:.2f}", "", ""]
        busy = "  ".join(f"{d.device} {d.utilisation:.0%}" for d in c.reports[-1].devices)
        solved = sum(r.correct for r in c.reports) / sum(r.problems for r in c.reports)
        table.add_row(*row, f"{solved:.1%}", busy)
    auto = next(c for c in found if c.name == "auto").plan
    knobs = f"{auto.draft_ahead} ahead, chunks of {auto.chunk_tokens}"
    where = ", ".join(f"{role} on {device}" for role, device in auto.placement.items())
    Console(width=150).print(table, f"auto: {where}; {knobs}. Times are measured unless their column says simulated.\n")


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=60, help="in each turn, half as many for deeper models")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=[""], help="those whose title has one of these in it")
    given = parser.parse_args()
    with TemporaryDirectory() as scratch:
        for title, flow, problems in cases(Path(scratch), given.problems):
            if any(word in title for word in given.cases):
                # One hand for the first fit, then two a turn.
                first, *hands = dealt(problem_set(flow.problems), problems, 1 + 2 * given.turns)
                show(title, measured(flow, costs_here(flow, first), hands))


if __name__ == "__main__":
    main()
