"""Fixed schedules as ordinary plans: what people run today, and what a solved plan is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cost import CostOp, Costs
from planner.graph import Op, to_text
from planner.lower import lower
from planner.machine import DeviceKind, Machine
from planner.passes import DraftAhead, OneAtATime, Pass, PrefetchRefine, run_passes
from planner.plan import Plan, Solver, priority_key
from planner.schedule.bounds import lower_bound_us
from planner.schedule.heft import list_schedule
from planner.schedule.instance import CHUNK_TOKENS, Placement, Schedule, build
from planner.workflow import NEEDED_ROLES, VERIFIER, RoleName, Workflow


@dataclass(frozen=True)
class Preset:
    """A fixed schedule: how far it runs ahead, with the roles where a person would put them."""

    name: str
    draft_ahead: int
    prefetch_refine: bool
    passes: tuple[Pass, ...]
    shadow_sync: bool = False


PRESETS: Mapping[str, Preset] = {
    "serial": Preset("serial", 0, False, (OneAtATime(),)),
    "overlapped": Preset("overlapped", 1, True, (DraftAhead(1), PrefetchRefine())),
    "heteroreason": Preset("heteroreason", 1, True, (DraftAhead(1), PrefetchRefine()), shadow_sync=True),
}
"""`serial` runs one task at a time; `overlapped` drafts one step ahead and prefetches the target's step; `heteroreason`
is the schedule published in arXiv 2609.28717: the same, and the draft's cache follows the target's step meanwhile."""


def preset(
    name: str, workflow: Workflow, machine: Machine, costs: Costs, models: dict[RoleName, str], rounds: int = 3
) -> Plan:
    """The plan of a preset. Raises UserError if the workflow does not fit on the machine."""
    chosen = PRESETS[name]
    graph = run_passes(lower(workflow, rounds, steady=True), chosen.passes)
    instance = build(graph, workflow, machine, costs)
    placement = fixed_placement(workflow, machine, instance.placements)
    speculate = chosen.draft_ahead > 0 or chosen.prefetch_refine
    schedule = list_schedule(instance, placement, speculate)
    return Plan(
        name=name,
        workflow=workflow,
        machine=machine,
        models=models,
        placement=dict(placement),
        draft_ahead=chosen.draft_ahead,
        prefetch_refine=chosen.prefetch_refine,
        chunk_tokens=CHUNK_TOKENS,
        priorities=_priorities(chosen, schedule, VERIFIER.get(workflow.policy.kind, RoleName.PRM)),
        graph=to_text(graph),
        timeline=schedule.slots,
        objective_us=schedule.objective_us,
        lower_bound_us=lower_bound_us(instance),
        status="heuristic",
        cost_source=costs_label(costs, placement),
        solver=Solver(name),
        shadow_sync=chosen.shadow_sync,
        sync_ahead=chosen.shadow_sync,
    )


def fixed_placement(workflow: Workflow, machine: Machine, placements: tuple[Placement, ...]) -> Placement:
    """The draft on an FPGA if there is one, the other roles spread over the rest in the machine's order."""
    roles = NEEDED_ROLES[workflow.policy.kind]
    order = {d.name: i for i, d in enumerate(machine.devices)}

    def taste(placement: Placement) -> tuple[bool, int, tuple[tuple[int, ...], ...]]:
        draft = placement.get(RoleName.DRAFT)
        off_fpga = draft is not None and machine.device(draft).kind is not DeviceKind.FPGA
        places = tuple(tuple(order[member] for member in machine.members(placement[r])) for r in roles)
        return off_fpga, -len(set(placement.values())), places

    return min(placements, key=taste)


def costs_label(costs: Costs, placement: Placement) -> str:
    """Where the durations of the placed roles come from."""
    return ", ".join(sorted({costs.origin(r, d, op).value for r, d in placement.items() for op in CostOp}))


def _priorities(chosen: Preset, schedule: Schedule, verifier: RoleName) -> dict[str, tuple[str, ...]]:
    """Needed work before speculative work, nearer rounds before later ones."""
    if not chosen.draft_ahead and not chosen.prefetch_refine:
        return dict.fromkeys(sorted(set(schedule.placement.values())), ())
    kinds: list[tuple[Op, int, RoleName]] = [(Op.PREFILL, 0, role) for role in schedule.placement]
    kinds += [(Op.BACKTRACK, 0, RoleName.TARGET), (Op.VERIFY, 0, verifier), (Op.DRAFT, 0, RoleName.DRAFT)]
    kinds += [(Op.REFINE, 0, RoleName.TARGET)] if chosen.prefetch_refine else []
    kinds += [(Op.SYNC, 0, RoleName.DRAFT), (Op.SYNC, 0, RoleName.PRM)] if chosen.shadow_sync else []
    for ahead in range(1, chosen.draft_ahead + 1):
        kinds += [(Op.VERIFY, ahead, verifier), (Op.DRAFT, ahead, RoleName.DRAFT)]
    devices = sorted(set(schedule.placement.values()))
    return {
        device: tuple(
            dict.fromkeys(priority_key(op, r) for op, r, role in kinds if schedule.placement.get(role) == device)
        )
        for device in devices
    }
