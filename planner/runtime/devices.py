"""The devices of a run: which are there, what is loaded on them, and the plan to go on by when that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.errors import UserError
from planner.machine import Machine
from planner.plan import Plan, asked_of
from planner.runtime.backend import ModelInfo
from planner.runtime.faults import DeviceFault, Fault, with_device, without
from planner.runtime.worker import Workers
from planner.workflow import Arithmetic, RoleName, Workflow

Replan = Callable[[Machine, Workflow], Plan]
"""Makes a plan of the workflow for a machine. Raises UserError if there is none."""


@dataclass(frozen=True)
class Change:
    """The run goes on by another plan."""

    why: str
    """Empty for the plan that the run begins with."""
    moved: tuple[RoleName, ...]
    """Roles whose caches are to be built again: their models were loaded just now, or are elsewhere."""


class Devices:
    """Keeps the plan that is followed in step with the devices that are there."""

    def __init__(self, plan: Plan, workers: Workers, delimiter: str, replan: Replan | None) -> None:
        """Nothing is loaded yet: the first `change` does that."""
        self.plan, self.models = plan, dict[RoleName, ModelInfo]()
        self._workers, self._delimiter, self._replan = workers, delimiter, replan
        self._whole = self._machine = plan.machine
        """All devices, and those that are there."""
        self._loaded: set[tuple[RoleName, str]] = set()
        """Which role's model is in the memory of which device."""
        self._asked: set[tuple[RoleName, str]] = set()
        """And which may be, since one of several devices did not load what all were asked to."""
        self._used: set[str] = set()
        """Devices, or sets of them, whose workers have been started."""
        self._processors = {role: plan.machine.device(device).kind_of_processor for role, device in _floats(plan)}
        """The kind of processor that each float role computes on: another one would round differently."""
        self._next: Plan | None = plan
        self._why: str | None = ""

    @property
    def due(self) -> bool:
        """Whether the run is to go on by another plan."""
        return self._why is not None

    @property
    def machine(self) -> Machine:
        """The devices that are there."""
        return self._machine

    def propose(self, plan: Plan, why: str) -> None:
        """Go on by this plan: what was asked for last counts."""
        self._check(plan)
        self._next, self._why = plan, why

    def lose(self, place: str, fault: Fault) -> None:
        """A device, or a set of devices that compute as one, has failed for good: its worker is ended at once."""
        self._workers.drop(place)
        for device in self._whole.members(place):
            self._take_out(device, f"device {place} is lost ({fault.kind}: {fault.what})")

    def remove(self, device: str) -> None:
        """A device is taken out by the user."""
        self._machine.device(device)
        self._take_out(device, f"device {device} was removed")

    def add(self, device: str) -> None:
        """A device of the whole machine is there again."""
        self._whole.device(device)
        if not self._is_there(device):
            self._machine = with_device(self._machine, device, self._whole)
            if self._replan is not None:
                self._next, self._why = None, f"device {device} was added"

    def change(self) -> Iterator[Change | DeviceFault]:
        """Take up what is due, and load the roles that are not where the plan has them. Nothing may be running.

        A device that refuses is taken out, told of, and the plan made anew. Raises UserError if no plan is left.
        """
        while self._why is not None:
            why, plan = self._why, self._next or self._made(self._why)
            gone = {place for place in self._used if not self._is_there(place)}
            for place in gone:
                self._workers.drop(place)
            self._used -= gone
            try:
                # What moves away goes first: its memory may be wanted.
                for role, place in sorted((self._loaded | self._asked) - _wanted(plan)):
                    self._workers.unload(place, role)
                    self._loaded.discard((role, place))
                    self._asked.discard((role, place))
                loaded = [*self._load(plan, plan.placement), *self._load(plan, plan.prefill_on)]
            except DeviceFault as failed:
                if not self.models and isinstance(failed.fault.error, UserError):
                    raise failed.fault.error from None  # at the start, what the user can mend is better mended
                for lost in (failed, *failed.others):
                    self.lose(lost.device, lost.fault)
                    yield lost
                continue
            moved = [role for role in plan.roles if plan.placement[role] != self.plan.placement[role]]
            self.plan, self._why, self._next = plan, None, None
            yield Change(why, tuple(dict.fromkeys([*loaded, *moved])))

    def _load(self, plan: Plan, places: Mapping[RoleName, str]) -> list[RoleName]:
        """Load the models of the plan's roles that are not in their places, all devices at once. Gives those roles."""
        missing = {role: place for role, place in places.items() if (role, place) in _wanted(plan) - self._loaded}
        self._used |= set(missing.values())
        placed = {role: (place, plan.workflow.roles[role]) for role, place in missing.items()}
        self._asked |= set(missing.items())
        self.models |= self._workers.load(placed, self._delimiter)
        self._loaded |= set(missing.items())
        self._asked -= self._loaded
        return list(missing)

    def _is_there(self, place: str) -> bool:
        return set(self._whole.members(place)) <= {d.name for d in self._machine.devices}

    def _take_out(self, device: str, why: str) -> None:
        if not self._is_there(device):
            return
        self._machine = without(self._machine, device)
        loaded = self._loaded
        self._loaded = {(role, place) for role, place in loaded if self._is_there(place)}
        self._asked = {(role, place) for role, place in self._asked if self._is_there(place)}
        if self._next is not None and all(map(self._is_there, self._next.places)):
            return  # the plan that is due does without it
        if self._next is not None or self._loaded != loaded or not all(map(self._is_there, self.plan.places)):
            self._next, self._why = None, why

    def _made(self, why: str) -> Plan:
        """A plan for the devices that are there."""
        homeless = [r for r in self.plan.roles if not self._places(r)]
        if homeless:
            raise self._over(why, f"no other device can take role {' and '.join(homeless)}")
        if self._replan is None:
            if all(map(self._is_there, self.plan.places)):
                return self.plan  # what was gone is there again
            here = replace(self.plan, prefill_on={})  # a prompt can be read where the role is
            roles = sorted({role for role, place in _wanted(here) if not self._is_there(place)})
            if not roles:
                return here
            raise self._over(why, f"there is nobody to plan anew for role {' and '.join(roles)}")
        try:
            plan = self._replan(self._machine, self.plan.workflow)
            self._check(plan)
        except UserError as error:
            raise self._over(why, f"there is no plan without it ({error})") from error
        return plan

    def _over(self, why: str, rest: str) -> UserError:
        where = f"machine {self._whole.name}"
        return UserError(f"{why}, and {rest}", where=where, mend="mend the device, or plan for another machine")

    def _places(self, role: RoleName) -> list[str]:
        """Where the role may be placed: what is there and computes in its class, as it did so far."""
        processor = self._processors.get(role)
        try:
            places = self._machine.candidates(self.plan.workflow.roles[role].numerics)
        except UserError:
            return []
        return [place.name for place in places if processor in (None, place.kind_of_processor)]

    def _check(self, plan: Plan) -> None:
        """Raise UserError for a plan whose answers, or whose devices, are others."""
        where = f"plan {plan.name}"
        if asked_of(plan) != asked_of(self.plan):
            mend = "make the plan of the workflow that is running"
            raise UserError("it is a plan of another workflow, other models or another seed", where=where, mend=mend)
        for role, place in sorted(_wanted(plan)):
            if place not in self._places(role):
                what = f"role {role} is placed on {place}, which is not there or computes otherwise"
                raise UserError(what, where=where, mend=f"place it on one of {', '.join(self._places(role))}")


def _wanted(plan: Plan) -> set[tuple[RoleName, str]]:
    """Which role's model belongs on which device."""
    return {(role, where[role]) for where in (plan.placement, plan.prefill_on) for role in plan.roles if role in where}


def _floats(plan: Plan) -> Iterator[tuple[RoleName, str]]:
    for role in plan.roles:
        if plan.workflow.roles[role].numerics.arithmetic is not Arithmetic.INT8:
            yield role, plan.placement[role]
