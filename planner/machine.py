"""Machine: the devices and links that a plan may use, with where each figure comes from. What the user has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

from planner.errors import UserError
from planner.units import Bytes, BytesPerSecond, Microseconds, OpsPerSecond, Watts
from planner.workflow import Arithmetic, Numerics, right_name
from planner.yaml_file import Rule, content_hash, from_mapping, hold, read_yaml, to_mapping, unknown

SET = "+"
"""Stands between the devices in the name of a set that computes as one, such as `gpu0+gpu1`."""
HOST = "host"
"""Name of the host's memory as an end of a link: devices without a link of their own exchange data over it."""


class DeviceKind(StrEnum):
    """What sort of processor a device is."""

    CPU = "cpu"
    GPU = "gpu"
    FPGA = "fpga"


class Transport(StrEnum):
    """How an FPGA's work is done: by an emulator, by its simulated RTL, or by a board."""

    EMULATE = "emulate"
    RTL = "rtl"
    BOARD = "board"


@dataclass(frozen=True)
class Device:
    """One device. Figures are peaks; the two efficiencies say how much of them a model gets."""

    name: str
    kind: DeviceKind
    backend: str
    """Entry point in the group `heteroreason.backends`: `jax`, `fpga`, or one that a package adds."""
    memory_bytes: Bytes
    bandwidth_bytes_per_s: BytesPerSecond
    """Between the device and its own memory."""
    ops_per_s: dict[Arithmetic, OpsPerSecond]
    """Operations a second (a multiply-add is two). An arithmetic that is not here is not provided."""
    active_w: Watts
    idle_w: Watts
    source: str
    """Where each figure comes from."""
    transport: Transport | None = None
    """For an FPGA, and only for one."""
    processor: str | None = None
    """Kind of processor, such as `RTX 3090`; None stands for `kind`. Equal names promise equal bits."""
    memory_efficiency: float = 1.0
    compute_efficiency: float = 1.0
    overhead_us: Microseconds = 0.0
    """For each call, whatever its length."""
    per_token_overhead_us: Microseconds = 0.0
    """For each forward pass within a call: a token when decoding, a block of rows when prefilling."""
    core: int | None = None
    """CPU core that the device's worker is pinned to."""
    count: int = 1
    """Devices that this stands for: above 1 for a set that computes as one, which no machine file holds."""
    processors: tuple[int, ...] = ()
    """Which of the accelerators that its backend sees the device is, by index; none: the first. Several compute roles
    of that `numerics.tensor_parallel` together; the device's figures are then those of all."""

    @property
    def kind_of_processor(self) -> str:
        """What `Numerics.processor` is compared with."""
        return self.processor or self.kind.value


@dataclass(frozen=True)
class Link:
    """A way for data between two devices, or a device and the host, the same in both directions."""

    a: str
    b: str
    bandwidth_bytes_per_s: BytesPerSecond
    latency_us: Microseconds
    source: str


@dataclass(frozen=True)
class Machine:
    """All of it. Two machines with the same `hash` give the same plans."""

    name: str
    devices: tuple[Device, ...]
    source: str
    links: tuple[Link, ...] = ()
    description: str = ""
    dispatch_us: Microseconds = 0.0
    """What the engine needs before each chunk: to see the end of the one before, to choose and to send the next."""

    @classmethod
    def load(cls, path_or_name: str | Path) -> Machine:
        """Read a file, or an entry of the catalogue by its name. Raises UserError."""
        text = str(path_or_name)
        if isinstance(path_or_name, Path) or "/" in text or text.endswith((".yaml", ".yml")):
            return cls.from_mapping(read_yaml(text), where=text)
        if text not in catalogue():
            raise unknown("is neither in the catalogue nor a file", text, catalogue(), where=f"machine {text}")
        with resources.as_file(resources.files("planner").joinpath("machines", f"{text}.yaml")) as path:
            return cls.from_mapping(read_yaml(path), where=f"machine {text}")

    @classmethod
    def from_mapping(cls, raw: Any, where: str) -> Machine:
        """Check a mapping read from a file called `where`."""
        machine = from_mapping(cls, raw, where)
        check(machine, where)
        return machine

    def to_mapping(self) -> dict[str, Any]:
        """Plain data in base units, the inverse of `from_mapping`."""
        return to_mapping(self)

    @property
    def hash(self) -> str:
        """Hash of the content."""
        return content_hash(self.to_mapping())

    def device(self, name: str) -> Device:
        """The device called `name`, or the set of devices as one device. Raises UserError."""
        parts = [self._single(part) for part in members(name)]
        return _as_one(name, parts) if len(parts) > 1 else parts[0]

    def members(self, placement: str) -> tuple[str, ...]:
        """The devices that a placement stands for."""
        return members(placement)

    def _single(self, name: str) -> Device:
        for device in self.devices:
            if device.name == name:
                return device
        known = [device.name for device in self.devices]
        raise unknown(f"there is no device {name}", name, known, where=f"machine {self.name}")

    def provides(self, device: str, numerics: Numerics) -> bool:
        """Whether the device, or set, computes in this class. Integers give the same bits on any processor."""
        found = self.device(device)
        wide = max(1, len(found.processors)) if found.count == 1 else found.count
        exact = found.count == 1 or numerics.tensor_parallel == wide
        if numerics.arithmetic not in found.ops_per_s or numerics.tensor_parallel > wide or not exact:
            return False
        bound = numerics.processor is not None and numerics.arithmetic != Arithmetic.INT8
        return not bound or found.kind_of_processor == numerics.processor

    def candidates(self, numerics: Numerics) -> tuple[Device, ...]:
        """The places of a role of this class: devices, or sets of `tensor_parallel` equal devices, each as one device.

        A role that computes in floats has one kind of processor. Raises UserError if there is no place, or if the
        class leaves open which of several kinds is meant: they differ in the last bits, so the placement would
        change answers.
        """
        degree = numerics.tensor_parallel
        every = [d for group in self.equal_devices() for d in combinations(group, degree)]
        every += [(d,) for d in self.devices if degree > 1 and len(d.processors) >= degree]
        places = [place_name([d.name for d in chosen], [d.name for d in self.devices]) for chosen in every]
        order = {d.name: i for i, d in enumerate(self.devices)}
        places.sort(key=lambda place: [order[d] for d in members(place)])
        found = tuple(self.device(place) for place in places if self.provides(place, numerics))
        where = f"machine {self.name}"
        if not found:
            on = f" on {numerics.processor}" if numerics.processor else ""
            what = "no device provides" if degree == 1 else f"no {degree} equal devices provide"
            mend = "change the numerics of the role or use another machine"
            raise UserError(f"{what} {numerics.arithmetic}{on}", where=where, mend=mend)
        kinds = sorted({device.kind_of_processor for device in found})
        if numerics.arithmetic != Arithmetic.INT8 and len(kinds) > 1:
            what = f"{numerics.arithmetic} is provided by {' and '.join(kinds)}, which differ in the last bits"
            raise UserError(what, where=where, mend="name one of them in the role's numerics.processor")
        return found

    def equal_devices(self) -> Iterable[list[Device]]:
        """The devices in groups that differ in nothing but name, source and where they are."""
        groups: dict[str, list[Device]] = {}
        for device in self.devices:
            figures = repr(replace(device, name="", source="", core=None, processors=()))
            groups.setdefault(figures, []).append(device)
        return groups.values()


@cache
def members(place: str) -> tuple[str, ...]:
    """The devices of a place: those of a set such as `gpu0+gpu1`, or the one device itself."""
    return tuple(place.split(SET))


def place_name(devices: Iterable[str], order: Sequence[str]) -> str:
    """The name of a set of devices, in the order of the machine; of one device, its own."""
    return SET.join(sorted(devices, key=order.index))


def _as_one(name: str, parts: Sequence[Device]) -> Device:
    """Equal devices as one that has the memory, the bandwidth, the operations and the power of all."""
    one, count = parts[0], len(parts)
    return replace(
        one,
        name=name,
        count=count,
        processors=tuple(p for part in parts for p in part.processors),
        memory_bytes=one.memory_bytes * count,
        bandwidth_bytes_per_s=one.bandwidth_bytes_per_s * count,
        ops_per_s={arithmetic: ops * count for arithmetic, ops in one.ops_per_s.items()},
        active_w=one.active_w * count,
        idle_w=one.idle_w * count,
    )


def all_reduce_us(machine: Machine, place: str, size_bytes: float) -> float:
    """Time for the devices of a set to add up data of that size: a ring sends it 2 (n - 1) / n times over each link.

    0 for a single device. The slowest way between two of them counts, with its latency at each of 2 (n - 1) turns.
    """
    names = members(place)
    if len(names) == 1:
        return 0.0
    turns, part = 2 * (len(names) - 1), size_bytes / len(names)
    return turns * max(_way_us(machine, a, b, part) for a, b in combinations(names, 2))


def transfer_us(machine: Machine, a: str, b: str, size_bytes: int) -> int:
    """Time to move data from one place to another. 0 to itself.

    Over the link of the two devices, else over the host in two hops. Each device of a set gets the data from the
    nearest of the others.
    """
    return max(min(_between_us(machine, x, y, size_bytes) for x in members(a)) for y in members(b))


def _way_us(machine: Machine, a: str, b: str, size_bytes: float) -> float:
    hops = _hops(machine, a, b)
    return sum(link.latency_us + 1e6 * size_bytes / link.bandwidth_bytes_per_s for link in hops) if hops else inf


def _between_us(machine: Machine, a: str, b: str, size_bytes: int) -> int:
    if a == b:
        return 0
    hops = _hops(machine, a, b)
    if not hops:
        raise UserError(_apart(a, b), where=f"machine {machine.name}", mend=_APART_MEND)
    return sum(_hop_us(link, size_bytes) for link in hops)


def catalogue() -> list[str]:
    """Names of the machines that ship."""
    files = resources.files("planner").joinpath("machines").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def check(machine: Machine, where: str) -> None:
    """Raise UserError for the first value that describes no machine."""
    hold(_rules(machine), where)
    for a, b in combinations([device.name for device in machine.devices], 2):
        if not _hops(machine, a, b):
            raise UserError(_apart(a, b), where=where, mend=_APART_MEND)


def _hops(machine: Machine, a: str, b: str) -> list[Link]:
    links = {frozenset((link.a, link.b)): link for link in machine.links}
    direct = links.get(frozenset((a, b)))
    if direct:
        return [direct]
    over_host = [links.get(frozenset((end, HOST))) for end in (a, b)]
    return [link for link in over_host if link] if all(over_host) else []


def _hop_us(link: Link, size_bytes: int) -> int:
    return max(1, round(link.latency_us + 1e6 * size_bytes / link.bandwidth_bytes_per_s))


def _apart(a: str, b: str) -> str:
    return f"links has no way from {a} to {b}"


_APART_MEND = f"add a link between them, or one from each to {HOST}"


def _rules(machine: Machine) -> Iterator[Rule]:
    yield "name", machine.name, right_name(machine.name), "use one line of 1 to 80 characters"
    yield "source", machine.source, bool(machine.source.strip()), "say where the figures come from"
    yield "dispatch_us", machine.dispatch_us, machine.dispatch_us >= 0, "use a number from 0"
    yield "devices", [], bool(machine.devices), "describe at least one device"
    names = [device.name for device in machine.devices]
    for index, device in enumerate(machine.devices):
        key = f"devices[{index}]"
        yield f"{key}.name", device.name, device.name not in names[:index], "give each device its own name"
        yield from _device_rules(key, device)
    seen: list[set[str]] = []
    for index, link in enumerate(machine.links):
        ends = {link.a, link.b}
        yield f"links[{index}]", f"{link.a} to {link.b}", ends not in seen, "keep one link for each pair"
        seen.append(ends)
        yield from _link_rules(f"links[{index}]", link, [*names, HOST])


def _device_rules(key: str, device: Device) -> Iterator[Rule]:
    right = right_name(device.name) and device.name == device.name.strip() != HOST and SET not in device.name
    yield f"{key}.name", device.name, right, f"use one line of 1 to 80 characters without {SET}, and not {HOST}"
    yield f"{key}.count", device.count, device.count == 1, "leave it out, and describe each device for itself"
    yield f"{key}.backend", device.backend, bool(device.backend.strip()), "name a backend, such as jax or fpga"
    yield f"{key}.source", device.source, bool(device.source.strip()), "say where each figure comes from"
    is_fpga, transport = device.kind == DeviceKind.FPGA, device.transport
    right = transport is not None or not is_fpga
    yield f"{key}.transport", transport, right, f"use one of {', '.join(Transport)} for an fpga"
    yield f"{key}.transport", transport, transport is None or is_fpga, "leave it out: only an fpga has one"
    processor = device.processor
    right = processor is None or right_name(processor)
    yield f"{key}.processor", processor, right, "use one line of 1 to 80 characters or leave it out"
    yield from _above_zero(key, device, "memory_bytes", "bandwidth_bytes_per_s", "active_w")
    yield f"{key}.ops_per_s", {}, bool(device.ops_per_s), f"name at least one of {', '.join(Arithmetic)}"
    for arithmetic, ops in device.ops_per_s.items():
        yield f"{key}.ops_per_s.{arithmetic}", ops, ops > 0, "use a number above 0"
    yield from _not_negative(key, device, "idle_w", "overhead_us", "per_token_overhead_us")
    mend = f"use at most active_w, which is {device.active_w:g}"
    yield f"{key}.idle_w", device.idle_w, device.idle_w <= device.active_w, mend
    for name in ("memory_efficiency", "compute_efficiency"):
        value = getattr(device, name)
        yield f"{key}.{name}", value, 0 < value <= 1, "use a number above 0, at most 1"
    indices = device.processors
    right = len(set(indices)) == len(indices) and all(0 <= i < 4096 for i in indices)
    yield f"{key}.processors", list(indices), right, "list each index once, from 0"
    yield f"{key}.processors", list(indices), not (is_fpga and indices), "leave it out for an fpga"
    core = device.core
    yield f"{key}.core", core, core is None or 0 <= core < 4096, "use the index of a CPU core, from 0"


def _link_rules(key: str, link: Link, ends: list[str]) -> Iterator[Rule]:
    for name in ("a", "b"):
        end = getattr(link, name)
        yield f"{key}.{name}", end, end in ends, f"use one of {', '.join(ends)}"
    yield f"{key}.b", link.b, link.a != link.b, "name two different ends"
    yield from _above_zero(key, link, "bandwidth_bytes_per_s")
    yield from _not_negative(key, link, "latency_us")
    yield f"{key}.source", link.source, bool(link.source.strip()), "say where the figures come from"


def _above_zero(key: str, of: object, *fields: str) -> Iterator[Rule]:
    for name in fields:
        yield f"{key}.{name}", getattr(of, name), getattr(of, name) > 0, "use a number above 0"


def _not_negative(key: str, of: object, *fields: str) -> Iterator[Rule]:
    for name in fields:
        yield f"{key}.{name}", getattr(of, name), getattr(of, name) >= 0, "use a number from 0"
