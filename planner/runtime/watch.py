"""Statistics live: what a run shows of acceptance and costs, and a plan anew, made aside, when the plan's are wrong."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from statistics import median

from planner.cost import CostOp, Costs, Origin, chunk_us
from planner.errors import UserError
from planner.machine import Machine
from planner.plan import Plan
from planner.policy import Event as Turn
from planner.runtime.child import start
from planner.shape import ModelShape
from planner.trace import Chunk, Decided, Event, Replanned
from planner.workflow import RoleName, Workflow

Ratios = Mapping[tuple[RoleName, str], float]
"""How many times as long as the cost model says the chunks of a role take on a device."""
Make = Callable[[Machine, Workflow, Ratios], Plan]
"""Makes a plan by what a run has shown. It is sent to another process, so it must be a function of a module."""


@dataclass(frozen=True)
class Margins:
    """How far a run may be from what its plan assumes before it is planned anew."""

    acceptance: float = 0.15
    """Difference of the share of drafts that are accepted."""
    cost: float = 1.5
    """How many times as long, or as short, the chunks of a role may take."""
    samples: int = 30
    """Verdicts, or chunks of a role on its device, before they say anything."""
    window: int = 200
    """So many of the last ones are looked at."""


@dataclass(frozen=True)
class ScaledCosts:
    """A cost model put right by what a run has shown. What it has not shown is as wrong as what it has."""

    costs: Costs
    ratios: Ratios

    @property
    def shapes(self) -> Mapping[RoleName, ModelShape]:
        """See `Costs`."""
        return self.costs.shapes

    def prefill_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """See `Costs`."""
        return max(1, round(self._ratio(role, device) * self.costs.prefill_us(role, device, tokens, context)))

    def decode_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """See `Costs`."""
        return max(1, round(self._ratio(role, device) * self.costs.decode_us(role, device, tokens, context)))

    def origin(self, role: RoleName, device: str, op: CostOp) -> Origin:
        """See `Costs`."""
        return Origin.FITTED if (role, device) in self.ratios else self.costs.origin(role, device, op)

    def _ratio(self, role: RoleName, device: str) -> float:
        if (role, device) in self.ratios:
            return self.ratios[role, device]
        of_role = [ratio for (other, _), ratio in self.ratios.items() if other is role]
        return median(of_role or self.ratios.values() or [1.0])


@dataclass
class Live:
    """Watches the events of a run; see `planner.runtime.engine.Watch`."""

    costs: Costs
    """By which the plan was made."""
    make: Make
    margins: Margins = field(default_factory=Margins)

    def __post_init__(self) -> None:
        self._assumed: dict[tuple[RoleName, str], float] = {}
        """The ratios that the present plan was made by."""
        self._aside: _Aside | None = None
        self._why = ""
        self._seen: dict[tuple[RoleName, str], float] = {}
        """The ratios that the proposal was made by, or is being made by."""
        self._proposed = ""
        """Its plan's hash."""
        self._forget()

    def see(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, Decided) and "draft" in event.scores:
            self._verdicts.append(event.event == Turn.ACCEPTED)
        elif isinstance(event, Chunk):
            role = RoleName(event.role)
            planned = chunk_us(self.costs, role, event.device, event.tokens_in, event.tokens_out, event.context)
            if planned:
                self._ratios[role, event.device].append((event.end_us - event.start_us) / planned)
        elif isinstance(event, Replanned):
            # The plan that is being made is one for how things were. Another's plan knows of no ratios.
            self._assumed = self._seen if event.plan == self._proposed else {}
            self.close()
            self._forget()

    def proposal(self, plan: Plan, machine: Machine) -> tuple[str, Plan] | None:
        """A plan that was made aside, once it is ready; begins to make one when the present plan is off."""
        if self._aside is not None:
            if not self._aside.ready():
                return None
            made, self._aside = self._aside.result(), None
            self._forget()
            if made is None:
                return None
            self._proposed = made.hash
            return self._why, made
        self._why = self.off(plan)
        if self._why:
            seen = {at: median(ratios) for at, ratios in self._ratios.items() if len(ratios) >= self.margins.samples}
            self._seen = self._assumed | seen
            self._aside = _Aside(self.make, machine, self._shown(plan.workflow), self._seen)
        return None

    def off(self, plan: Plan) -> str:
        """What the run has shown that the plan does not assume, in words; empty if nothing."""
        least, said = self.margins.samples, plan.workflow.statistics.accept
        if len(self._verdicts) >= least:
            share = self._share(plan.workflow)
            if abs(share - said) > (margin := self.margins.acceptance):
                beyond = f"off by more than {margin * 100:g} points"
                return f"{share:.0%} of the drafts are accepted where the plan assumes {said:.0%}, {beyond}"
        for (role, device), ratios in self._ratios.items():
            if len(ratios) >= least and plan.placement.get(role) == device:
                times = median(ratios) / self._assumed.get((role, device), 1.0)
                if not 1 / self.margins.cost <= times <= self.margins.cost:
                    beyond = f"off by more than {self.margins.cost:g} times"
                    return f"work of {role} on {device} takes {times:.2f} times as long as the plan assumes, {beyond}"
        return ""

    def close(self) -> None:
        """Give up what is being made; calling it twice is harmless."""
        if self._aside is not None:
            self._aside.close()
            self._aside = None

    def _forget(self) -> None:
        self._verdicts: deque[bool] = deque(maxlen=self.margins.window)
        self._ratios: defaultdict[tuple[RoleName, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=self.margins.window)
        )

    def _shown(self, workflow: Workflow) -> Workflow:
        """The workflow with the acceptance that the run shows."""
        if len(self._verdicts) < self.margins.samples:
            return workflow
        share = round(self._share(workflow), 3)
        return replace(workflow, statistics=replace(workflow.statistics, accept=share))

    def _share(self, workflow: Workflow) -> float:
        """The share of drafts that are accepted, as the workflow's statistics count it."""
        return workflow.policy.single(sum(self._verdicts) / len(self._verdicts))


class _Aside:
    """A plan that is being made in a process of its own, which gives way to the workers."""

    def __init__(self, make: Make, machine: Machine, workflow: Workflow, ratios: Ratios) -> None:
        self._process, self._ours = start(_make_aside, (make, machine, workflow, ratios), "heteroreason-planner")

    def ready(self) -> bool:
        """Whether the process has made a plan, or has ended without one."""
        return self._ours.poll()

    def result(self) -> Plan | None:
        """The plan; None if there is none, or its process stopped in the middle of telling it."""
        try:
            return self._ours.recv()
        except (EOFError, OSError):
            return None
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join(5.0)
        self._ours.close()


def _make_aside(connection: Connection, make: Make, machine: Machine, workflow: Workflow, ratios: Ratios) -> None:
    if hasattr(os, "nice"):
        os.nice(10)
    with suppress(UserError):  # no plan is a result too: the run goes on as it does
        connection.send(make(machine, workflow, ratios))
