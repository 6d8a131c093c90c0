"""Cost models: how long a device takes to read and to write tokens, from figures or from the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from planner.errors import UserError
from planner.machine import Device, DeviceKind, Machine, all_reduce_us, members
from planner.shape import BYTES_EACH, ModelShape
from planner.units import Microseconds
from planner.workflow import Arithmetic, Numerics, RoleName, Statistics, Workflow
from planner.yaml_file import Rule, content_hash, from_mapping, hold, read_yaml, to_mapping

CACHES = 2
"""Caches that a role holds on its device for a problem: the main one, and the shadow that reads on beside it."""


class CostOp(StrEnum):
    """The two ways of work that costs are told apart by."""

    PREFILL = "prefill"
    """Reading tokens that are known: prompts, verification, synchronisation."""
    DECODE = "decode"
    """Writing tokens one after another."""


class Origin(StrEnum):
    """Where a cost comes from, as reports show it. The first that is there is taken."""

    MEASURED = "measured"
    FITTED = "fitted"
    PUBLISHED = "published"
    """Somebody else's figure for the same model on such a device."""
    ROOFLINE = "modelled (roofline)"


class Costs(Protocol):
    """What the planner asks of a cost model. Times are integer microseconds, at least 1.

    Raises UserError where a role cannot run on a device.
    """

    @property
    def shapes(self) -> Mapping[RoleName, ModelShape]:
        """The models' shapes, for the memory that they need."""
        ...

    def prefill_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """Time to read `tokens` tokens after `context` tokens."""
        ...

    def decode_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """Time to write `tokens` tokens one after another, the first of them after `context` tokens."""
        ...

    def origin(self, role: RoleName, device: str, op: CostOp) -> Origin:
        """Where the two figures come from."""
        ...


def chunk_us(costs: Costs, role: RoleName, device: str, read: int, written: int, context: int) -> int:
    """Time of a chunk that reads tokens after `context` tokens and then writes some; 0 if it does neither."""
    total = costs.prefill_us(role, device, read, context) if read else 0
    return total + (costs.decode_us(role, device, written, context + read) if written else 0)


@dataclass(frozen=True)
class RooflineCosts:
    """A pass takes the longer of two times: to read weights and cache from memory, and to compute its rows.

    A float role computes `row_block` rows against a cache of `cache_tokens` in every pass, padded, as its numerics
    class says. The integer model needs one row for a token and reads what is in the cache; an FPGA also prefills
    it row by row.
    """

    machine: Machine
    shapes: Mapping[RoleName, ModelShape]
    numerics: Mapping[RoleName, Numerics]

    def prefill_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """Passes of a block of rows each, and the overheads."""
        found, numerics = self._on(role, device), self.numerics[role]
        rows = 1 if found.kind == DeviceKind.FPGA else numerics.row_block
        passes = ceil(_counted(tokens) / rows)
        return _whole_us(found.overhead_us + passes * self._pass_us(role, found, rows, context + tokens / 2))

    def decode_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """A pass a token, and the overheads."""
        found, numerics = self._on(role, device), self.numerics[role]
        rows = 1 if numerics.arithmetic == Arithmetic.INT8 else numerics.row_block
        pass_us = self._pass_us(role, found, rows, context + tokens / 2)
        return _whole_us(found.overhead_us + _counted(tokens) * pass_us)

    def origin(self, role: RoleName, device: str, op: CostOp) -> Origin:
        """Always the roofline."""
        return Origin.ROOFLINE

    def _on(self, role: RoleName, device: str) -> Device:
        if role not in self.shapes or role not in self.numerics:
            raise UserError(f"role {role} has no model shape", mend="give its shape and numerics to the cost model")
        _must_run(self.machine, role, device, self.numerics[role])
        return self.machine.device(device)

    def _pass_us(self, role: RoleName, device: Device, rows: int, cached: float) -> float:
        """One pass of `rows` rows with `cached` tokens in the cache on average."""
        shape, numerics = self.shapes[role], self.numerics[role]
        slots = cached if numerics.arithmetic == Arithmetic.INT8 else numerics.cache_tokens
        size = shape.weight_bytes + slots * shape.kv_bytes_per_token
        memory = size / (device.bandwidth_bytes_per_s * device.memory_efficiency)
        ops = device.ops_per_s[numerics.arithmetic] * device.compute_efficiency
        # Devices that compute as one add up their parts after attention and after the feed-forward block.
        numbers = rows * shape.hidden * BYTES_EACH[numerics.arithmetic]
        sums = 2 * shape.layers * all_reduce_us(self.machine, device.name, numbers)
        return 1e6 * max(memory, rows * shape.flops_per_token / ops) + sums + device.per_token_overhead_us


@dataclass(frozen=True)
class CostEntry:
    """What one role costs on one device.

    prefill: `base_us + per_token_us * tokens + per_context_us * context`.
    decode: `base_us`, and for each token `per_token_us + per_context_us * (tokens before it)`.
    """

    role: RoleName
    device: str
    op: CostOp
    per_token_us: Microseconds
    source: str
    """Where the figures come from: who measured what, or the trace that they were fitted to."""
    base_us: Microseconds = 0.0
    per_context_us: Microseconds = 0.0
    origin: Origin = Origin.MEASURED

    def us(self, tokens: int, context: int) -> int:
        """Time for `tokens` tokens after `context` tokens."""
        before = context if self.op == CostOp.PREFILL else tokens * context + tokens * (tokens - 1) / 2
        return _whole_us(self.base_us + self.per_token_us * _counted(tokens) + self.per_context_us * before)


@dataclass(frozen=True)
class Fit:
    """How well the fitted entries of a role on a device say what was seen."""

    role: RoleName
    device: str
    rows: int
    left_out: int
    """Rows that were strays, such as cold starts."""
    median_error: float
    """Median of |fitted - seen| / seen."""
    total_error: float
    """Fitted total over the seen total, minus 1."""


@dataclass(frozen=True)
class CostTable:
    """Measured, fitted or published costs of a machine; they go before the roofline."""

    entries: tuple[CostEntry, ...]
    description: str = ""
    statistics: Statistics | None = None
    """What a fit saw of outcomes and lengths."""
    fits: tuple[Fit, ...] = ()
    dispatch_us: Microseconds | None = None
    """In place of the machine's; see `planner.machine.Machine`."""

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a YAML file. Raises UserError."""
        return cls.from_mapping(read_yaml(path), where=str(path))

    @classmethod
    def from_mapping(cls, raw: Any, where: str) -> CostTable:
        """Check a mapping read from a file called `where`."""
        table = from_mapping(cls, raw, where)
        hold(_rules(table), where)
        return table

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, the inverse of `from_mapping`."""
        return to_mapping(self)

    @property
    def hash(self) -> str:
        """Hash of the content."""
        return content_hash(self.to_mapping())

    def find(self, role: RoleName, device: str, op: CostOp) -> CostEntry | None:
        """The entry that counts: measured before fitted before published."""
        found = [e for e in self.entries if (e.role, e.device, e.op) == (role, device, op)]
        return min(found, key=lambda entry: list(Origin).index(entry.origin), default=None)

    def on(self, machine: Machine) -> CostTable | None:
        """What of it holds on the devices of a machine that has lost some; None if nothing does."""
        there = {device.name for device in machine.devices}
        entries = tuple(entry for entry in self.entries if there.issuperset(members(entry.device)))
        return replace(self, entries=entries) if entries else None

    def over(self, other: CostTable) -> CostTable:
        """This table, with what only the other one has."""
        own = {(e.role, e.device, e.op) for e in self.entries}
        rest = tuple(e for e in other.entries if (e.role, e.device, e.op) not in own)
        kept = {(e.role, e.device) for e in rest} - {(f.role, f.device) for f in self.fits}
        return replace(
            self,
            entries=(*self.entries, *rest),
            description=f"{self.description}, over: {other.description}",
            statistics=self.statistics or other.statistics,
            fits=(*self.fits, *(f for f in other.fits if (f.role, f.device) in kept)),
            dispatch_us=other.dispatch_us if self.dispatch_us is None else self.dispatch_us,
        )


@dataclass(frozen=True)
class TableCosts:
    """A table where it has an entry, another cost model where it has none."""

    table: CostTable
    otherwise: Costs

    @property
    def shapes(self) -> Mapping[RoleName, ModelShape]:
        """Those of the other model."""
        return self.otherwise.shapes

    def prefill_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """From the table, else from the other model."""
        entry = self.table.find(role, device, CostOp.PREFILL)
        return entry.us(tokens, context) if entry else self.otherwise.prefill_us(role, device, tokens, context)

    def decode_us(self, role: RoleName, device: str, tokens: int, context: int) -> int:
        """From the table, else from the other model."""
        entry = self.table.find(role, device, CostOp.DECODE)
        return entry.us(tokens, context) if entry else self.otherwise.decode_us(role, device, tokens, context)

    def origin(self, role: RoleName, device: str, op: CostOp) -> Origin:
        """That of the entry, else that of the other model."""
        entry = self.table.find(role, device, op)
        return entry.origin if entry else self.otherwise.origin(role, device, op)


def cost_model(
    machine: Machine, workflow: Workflow, shapes: Mapping[RoleName, ModelShape], table: CostTable | None = None
) -> Costs:
    """The costs of a workflow on a machine: measured before fitted before published before roofline.

    Raises UserError if the table names a device that the machine has not, or one that cannot run the role.
    """
    numerics = {name: role.numerics for name, role in workflow.roles.items()}
    roofline = RooflineCosts(machine, shapes, numerics)
    if table is None:
        return roofline
    for entry in table.entries:
        machine.device(entry.device)
        if entry.role in numerics:
            _must_run(machine, entry.role, entry.device, numerics[entry.role])
    return TableCosts(table, roofline)


@dataclass(frozen=True)
class Shortage:
    """A device that cannot hold what is placed on it."""

    device: str
    roles: tuple[RoleName, ...]
    needed_bytes: int
    memory_bytes: int

    @property
    def missing_bytes(self) -> int:
        """How much memory is wanting."""
        return self.needed_bytes - self.memory_bytes

    def __str__(self) -> str:
        """For error messages."""
        need, have = self.needed_bytes / 1e9, self.memory_bytes / 1e9
        return f"{self.device} has {have:.3g} GB and {' and '.join(self.roles)} need {need:.3g} GB"


def shortages(
    machine: Machine,
    placement: Mapping[RoleName, str],
    workflow: Workflow,
    costs: Costs,
    caches: int = CACHES,
    also: Mapping[RoleName, str] | None = None,
) -> list[Shortage]:
    """The devices whose memory is too small for the weights and the caches of the roles placed on them.

    Devices of a set share a role's weights and caches evenly. `also` are further places of roles.
    """
    found = []
    everything = [*placement.items(), *(also or {}).items()]
    for device in machine.devices:
        parts = [(r, len(members(where))) for r, where in everything if device.name in members(where)]
        roles = tuple(dict.fromkeys(r for r, _ in parts))
        needed = sum(costs.shapes[r].held_bytes(caches * workflow.roles[r].numerics.cache_tokens, n) for r, n in parts)
        if needed > device.memory_bytes:
            found.append(Shortage(device.name, roles, needed, device.memory_bytes))
    return found


def active_mj(device: Device, us: int) -> float:
    """Energy of a device that works for `us` microseconds, in millijoules."""
    return device.active_w * us / 1000


def idle_mj(device: Device, us: int) -> float:
    """Energy of a device that waits for `us` microseconds, in millijoules."""
    return device.idle_w * us / 1000


def _must_run(machine: Machine, role: RoleName, device: str, numerics: Numerics) -> None:
    if not machine.provides(device, numerics):
        on = f" on {numerics.processor}" if numerics.processor else ""
        what = f"device {device} does not provide {numerics.arithmetic}{on}, which role {role} needs"
        raise UserError(what, where=f"machine {machine.name}", mend="place the role elsewhere or change its numerics")


def _counted(tokens: int) -> int:
    if tokens < 0:
        raise ValueError(f"a cost was asked for {tokens} tokens")
    return tokens


def _whole_us(us: float) -> int:
    return max(1, round(us))


def _rules(table: CostTable) -> Iterator[Rule]:
    yield "entries", [], bool(table.entries), "give at least one entry"
    sent = table.dispatch_us
    yield "dispatch_us", sent, sent is None or sent >= 0, "use a number from 0"
    seen: set[tuple[Any, ...]] = set()
    for index, entry in enumerate(table.entries):
        key = f"entries[{index}]"
        for name in ("base_us", "per_token_us", "per_context_us"):
            yield f"{key}.{name}", getattr(entry, name), getattr(entry, name) >= 0, "use a number from 0"
        yield f"{key}.source", entry.source, bool(entry.source.strip()), "say where the figures come from"
        right = entry.origin != Origin.ROOFLINE
        yield f"{key}.origin", entry.origin, right, "use measured, fitted or published"
        same = (entry.role, entry.device, entry.op, entry.origin)
        text = f"{entry.origin} {entry.op} of {entry.role} on {entry.device}"
        yield key, text, same not in seen, "keep one entry for each"
        seen.add(same)
