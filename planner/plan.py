"""Plan: the artifact that a run follows. JSON with a schema version and a hash of its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner import machine, workflow
from planner.errors import UserError
from planner.graph import Op, TaskGraph, from_text
from planner.machine import Machine
from planner.schedule.aim import NO_CAP, Cap, Objective
from planner.schedule.instance import Schedule, Slot
from planner.workflow import NEEDED_ROLES, RoleName, Statistics, Workflow
from planner.yaml_file import content_hash, from_mapping, to_mapping

SCHEMA = "heteroreason.plan/1"


@dataclass(frozen=True)
class Solver:
    """How the plan was found. It is no part of the plan's hash."""

    name: str
    """`cp-sat`, or the name of a preset."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Where each role runs, how far work runs ahead, and in which order each device takes what is ready."""

    name: str
    workflow: Workflow
    machine: Machine
    models: dict[RoleName, str]
    """Hash of each role's checkpoint."""
    placement: dict[RoleName, str]
    draft_ahead: int
    """Steps that may be drafted on before a verdict is known."""
    prefetch_refine: bool
    """Whether the target starts on a step before the draft of it is rejected."""
    chunk_tokens: int
    """Tokens that are generated before a device looks up: a cancel takes effect then."""
    priorities: dict[str, tuple[str, ...]]
    """Device -> kinds of work, `OP@round`, most urgent first. What is not listed is not started ahead of need."""
    graph: str
    """The window that was scheduled, in the text form of `planner.graph`."""
    timeline: tuple[Slot, ...]
    objective_us: float
    lower_bound_us: float
    status: str
    cost_source: str
    """Where the durations come from, such as `modelled (roofline)`."""
    solver: Solver = field(default_factory=lambda: Solver("hand"))
    prefetch_ahead: int = 0
    """Drafted steps with an open verdict after which the target also starts early."""
    early_next: bool = False
    """Whether work goes on from a refined step, or an alternative, before its own verdict."""
    batch_verify: bool = False
    """Whether one pass of the verifier scores all drafted steps that are ready."""
    alternatives: bool = False
    """Whether the alternative of a backtrack is written while the refined step is still being verified."""
    shadow_sync: bool = False
    """Whether draft and verifier read the target's step while it is written."""
    sync_ahead: bool = False
    """Whether they do so before the verdict on the draft, too, beside what they hold of the draft's own steps."""
    prefill_on: dict[RoleName, str] = field(default_factory=dict)
    """Where a role's prompt is read, if not where the role runs: its cache is moved there afterwards."""
    objective: Objective = Objective.LATENCY
    """What the plan was made to be small in."""
    max_latency: Cap = NO_CAP
    max_energy: Cap = NO_CAP
    """What a problem may take, as it was asked for: a plan made anew in a run keeps to it, too."""
    energy_mj: float = 0.0
    """Expected energy a round of the window, as planned; 0 if it was not asked for."""
    bound: float = 0.0
    """Lower bound of the objective, in mJ or mJ x us, where that is not the latency."""

    @property
    def gap(self) -> float:
        """How much of the objective a better plan could save at most: (objective - bound) / objective."""
        latency = self.objective is Objective.LATENCY
        value = self.objective.of(self.objective_us, self.energy_mj)
        return 0.0 if value == 0 else 1.0 - (self.lower_bound_us if latency else self.bound) / value

    @property
    def hash(self) -> str:
        """Hash of the content, solver time left out."""
        return content_hash({k: v for k, v in self.to_mapping().items() if k not in ("solver", "hash", "schema")})

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """The roles that take part."""
        return NEEDED_ROLES[self.workflow.policy.kind]

    @property
    def places(self) -> tuple[str, ...]:
        """The devices, and sets of devices, that work."""
        return tuple(dict.fromkeys((*self.placement.values(), *self.prefill_on.values())))

    def place_of(self, op: Op, role: RoleName) -> str:
        """Where a role does work of a kind."""
        place = self.placement[role]
        return self.prefill_on.get(role, place) if op is Op.PREFILL else place

    @property
    def task_graph(self) -> TaskGraph:
        """The window that was scheduled."""
        return from_text(self.graph, f"plan {self.name}")

    def to_mapping(self) -> dict[str, Any]:
        """Plain data."""
        return to_mapping(self)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"schema": SCHEMA, "hash": self.hash, **self.to_mapping()}, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a JSON file. Raises UserError for another version, an unknown key, or content that was changed."""
        where = str(path)
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError("no such file", where=where, mend="make one with `heteroreason plan`") from None
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror})", where=where, mend="name a plan file") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"not JSON ({error})", where=where, mend="make it anew with `heteroreason plan`") from None
        return cls.from_mapping(raw, where)

    @classmethod
    def from_mapping(cls, raw: Any, where: str) -> Plan:
        """Check the mapping of a plan file."""
        if not isinstance(raw, Mapping) or "schema" not in raw:
            raise UserError("is no plan: it has no key schema", where=where, mend="make one with `heteroreason plan`")
        content = {k: v for k, v in raw.items() if k not in ("schema", "hash")}
        if raw["schema"] != SCHEMA:
            what = f"schema is {raw['schema']!r} and this version reads {SCHEMA!r}"
            raise UserError(what, where=where, mend="make the plan anew with `heteroreason plan`")
        plan = from_mapping(cls, content, where)
        if raw.get("hash") != plan.hash:
            raise UserError(
                "hash does not match its content",
                where=where,
                mend=f"make it anew, or set hash to {plan.hash!r} if the change was meant",
            )
        check(plan, where)
        return plan


def asked_of(plan: Plan) -> str:
    """Hash of all that a plan's answers depend on: statistics and everything about devices left out."""
    workflow = replace(plan.workflow, statistics=Statistics()).to_mapping()
    return content_hash({"workflow": workflow, "models": {str(k): v for k, v in plan.models.items()}})


def priority_key(op: Op, round: int) -> str:
    """How a plan names a kind of work: `DRAFT@1` drafts one step on from the one that is being decided."""
    return f"{op}@{round}"


def priorities_of(schedule: Schedule, graph_text: str) -> dict[str, tuple[str, ...]]:
    """The order in which the schedule's devices come to each kind of work for the first time."""
    graph = from_text(graph_text)
    first: dict[str, dict[str, int]] = {}
    for slot in schedule.slots:
        task = graph.by_id[slot.task]
        kinds = first.setdefault(slot.device, {})
        key = priority_key(task.op, task.round)
        kinds[key] = min(kinds.get(key, slot.start_us), slot.start_us)
    return {device: tuple(sorted(kinds, key=lambda k: (kinds[k], k))) for device, kinds in sorted(first.items())}


def check(plan: Plan, where: str) -> None:
    """Raise UserError where the parts of a plan do not fit together."""
    workflow.check(plan.workflow, f"{where}: workflow")
    machine.check(plan.machine, f"{where}: machine")
    from_text(plan.graph, f"{where}: graph")
    for role in plan.roles:
        if role not in plan.placement:
            raise UserError(f"placement.{role} is missing", where=where, mend="name the device of the role")
        device, numerics = plan.placement[role], plan.workflow.roles[role].numerics
        plan.machine.device(device)
        if device not in [d.name for d in plan.machine.candidates(numerics)]:
            what = f"placement.{role} is {device!r}, which does not compute {numerics.arithmetic}"
            raise UserError(what, where=where, mend="place the role on a device that does")
    for device in plan.priorities:
        plan.machine.device(device)
    for role, device in plan.prefill_on.items():
        plan.machine.device(device)
        right = role is RoleName.DRAFT and device in [
            d.name for d in plan.machine.candidates(plan.workflow.roles[role].numerics)
        ]
        if not right or device == plan.placement.get(role):
            what = f"prefill_on.{role} is {device!r}, where the role's prompt cannot be read for another device"
            raise UserError(what, where=where, mend="name another device that computes in the draft's numerics class")
    if plan.draft_ahead < 0 or plan.prefetch_ahead < 0 or plan.chunk_tokens < 1:
        raise UserError("draft_ahead or chunk_tokens is too small", where=where, mend="use 0 or more, and 1 or more")
