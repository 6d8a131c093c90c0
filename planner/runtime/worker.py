"""Workers: one for each device, behind one small interface for both clocks.

`ProcessWorkers` runs each device's backend in a process of its own and measures wall-clock time. `VirtualWorkers` does
the same work in this process and takes the times from the machine's cost model, so that a plan for devices that are
not here can be rehearsed with the real models.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, Protocol

from planner.cost import Costs, chunk_us
from planner.errors import UserError
from planner.machine import Device, Machine
from planner.runtime.backend import Backend, ModelInfo, Output, Work, perform
from planner.runtime.faults import DeviceFault, Fault, FaultKind, fault_of
from planner.trace import ClockKind
from planner.workflow import Role, RoleName

GROUP = "heteroreason.backends"


@dataclass(frozen=True)
class Done:
    """A chunk that is over: with an output, or with a fault."""

    device: str
    output: Output
    """Empty if there is a fault."""
    start_us: int
    end_us: int
    fault: Fault | None = None


class Workers(Protocol):
    """All devices of a machine. Only `wait` lets time pass.

    `load` and `encode` raise DeviceFault for what is the device's fault, and UserError as the backend did.
    """

    clock: ClockKind

    def load(self, placed: Mapping[RoleName, tuple[str, Role]], delimiter: str) -> dict[RoleName, ModelInfo]:
        """Have each device load the models of the roles that are placed on it, all devices at once.

        What the device has loaded already stays. A UserError of the backend is a fault here, too.
        """
        ...

    def unload(self, device: str, name: RoleName) -> None:
        """Have a free device free the model of a role. A device without a worker is left alone."""
        ...

    def encode(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a text. A device that is busy answers after its chunk."""
        ...

    def encode_prompt(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a prompt. A device that is busy answers after its chunk."""
        ...

    def submit(self, device: str, work: Work, delay_us: int, limit_us: int) -> None:
        """Give a free device a chunk; what it needs arrives after `delay_us` (virtual clock only). Taking over what
        another device has read counts from the start: that is the work.

        A chunk that is not over after `limit_us` ends with the fault `hung`.
        """
        ...

    def wait(self, until_us: int | None = None) -> Done | None:
        """The next chunk that is over, or None once it is `until_us`, whichever comes first.

        One of the two must be to come: a chunk that runs, or a time.
        """
        ...

    def drop(self, device: str) -> None:
        """End the device's worker, whatever it does, and forget its chunk. Its models are to be loaded again."""
        ...

    def now_us(self) -> int:
        """The time now, in microseconds from some beginning."""
        ...

    def close(self) -> None:
        """End all workers; calling it twice is harmless."""
        ...


def make_backend(device: Device) -> Backend:
    """A backend for the device, by its entry point. Raises UserError if there is none of that name."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if device.backend not in found:
        raise UserError(
            f"backend {device.backend!r} of device {device.name} is not installed",
            mend=f"use one of {', '.join(sorted(found))}",
        )
    options = {"transport": device.transport.value} if device.transport else {}
    if device.count > 1 and len(device.processors) != device.count:
        what = f"the devices of the set {device.name} do not say which processors they are"
        raise UserError(what, mend="give each of them its index in `processors` in the machine file")
    if device.processors:
        options["devices"] = ",".join(map(str, device.processors))
    return found[device.backend].load()(options)


@dataclass
class Shelf:
    """Backends of this process, one for each kind, shared by the devices and plans that are rehearsed in it."""

    _backends: dict[tuple[object, ...], Backend] = field(default_factory=dict)

    def backend(self, device: Device) -> Backend:
        """The backend of the device's kind, made when it is first asked for."""
        kind = (device.backend, device.transport, device.processors)
        if kind not in self._backends:
            self._backends[kind] = make_backend(device)
        return self._backends[kind]

    def close(self) -> None:
        """Close all."""
        while self._backends:
            self._backends.popitem()[1].close()


@dataclass(frozen=True)
class Shelved(Mapping[str, Backend]):
    """The backends of a machine's devices, each taken from a shelf when it is first asked for."""

    shelf: Shelf
    machine: Machine

    def __getitem__(self, device: str) -> Backend:
        """The backend of a device, or of a set of devices."""
        return self.shelf.backend(self.machine.device(device))

    def __iter__(self) -> Iterator[str]:
        """The names of the devices."""
        return iter([device.name for device in self.machine.devices])

    def __len__(self) -> int:
        """How many devices there are."""
        return len(self.machine.devices)


Duration = Callable[[str, Work, Output], int]
"""What a chunk takes on a device, in microseconds."""


class VirtualWorkers:
    """The work really runs, one piece after another; when it ends is what the cost model says."""

    clock = ClockKind.VIRTUAL

    def __init__(self, duration: Duration, backends: Mapping[str, Backend]) -> None:
        """`backends` by device. They are the caller's to close."""
        self._duration, self._backends = duration, backends
        self._now_us = 0
        self._running: list[tuple[int, str, Done]] = []

    def load(self, placed: Mapping[RoleName, tuple[str, Role]], delimiter: str) -> dict[RoleName, ModelInfo]:
        """See `Workers`."""
        found = {}
        for name, (device, role) in placed.items():
            try:
                found[name] = self._backends[device].load(name, role, delimiter)
            except Exception as error:
                fault = fault_of(error)
                raise DeviceFault(replace(fault, kind=FaultKind.REFUSED), device) from error
        return found

    def unload(self, device: str, name: RoleName) -> None:
        """Nothing: devices may share a backend, and another may have the role now."""

    def encode(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return _told(device, self._backends[device].encode, name, text)

    def encode_prompt(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return _told(device, self._backends[device].encode_prompt, name, text)

    def submit(self, device: str, work: Work, delay_us: int, limit_us: int) -> None:
        """Do the chunk at once and note when it would be over."""
        output, fault = Output(), None
        ready = self._now_us + delay_us
        start = self._now_us if work.handed else ready
        try:
            output = perform(self._backends[device], work)
            took_us = max(1, self._duration(device, work, output))
        except Exception as error:  # the engine decides what a failing device means
            fault = fault_of(error)
            took_us = limit_us if fault.kind is FaultKind.HUNG else 1
        end = ready + took_us
        heapq.heappush(self._running, (end, device, Done(device, output, start, end, fault)))

    def wait(self, until_us: int | None = None) -> Done | None:
        """Let time pass up to the end of the next chunk, or up to `until_us`."""
        if until_us is not None and (not self._running or self._running[0][0] > until_us):
            self._now_us = max(self._now_us, until_us)
            return None
        end, _, done = heapq.heappop(self._running)
        self._now_us = end
        return done

    def drop(self, device: str) -> None:
        """See `Workers`. The backend stays."""
        self._running = [item for item in self._running if item[1] != device]
        heapq.heapify(self._running)

    def now_us(self) -> int:
        """Modelled microseconds."""
        return self._now_us

    def close(self) -> None:
        """Forget what is running."""
        self._running.clear()


def _told(device: str, call: Callable[..., Any], *args: Any) -> Any:
    """A call to a backend whose faults name the device."""
    try:
        return call(*args)
    except UserError:
        raise
    except Exception as error:
        raise DeviceFault(fault_of(error), device) from error


def modelled(costs: Costs) -> Duration:
    """The time of a chunk by a cost model."""

    def duration_us(device: str, work: Work, output: Output) -> int:
        return chunk_us(costs, RoleName(work.role), device, work.tokens_in, output.tokens_out, work.keep)

    return duration_us


@dataclass(frozen=True)
class Patience:
    """How long a chunk may take before its device counts as hung."""

    duration: Duration | None = None
    """What a chunk should take; None if nobody knows."""
    factor: float = 50.0
    """A chunk may take so many times as long."""
    least_us: int = 60_000_000
    """And always as long as this."""
    otherwise_us: int = 300_000_000
    """Where no duration is known."""

    def limit_us(self, device: str, work: Work) -> int:
        """The longest time for a chunk."""
        if self.duration is None:
            return self.otherwise_us
        longest = Output(tokens=(0,) * work.most_tokens)
        return max(self.least_us, round(self.factor * self.duration(device, work, longest)))
