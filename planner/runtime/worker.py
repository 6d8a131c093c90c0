"""Workers: one for each device, behind one small interface for both clocks.

`ProcessWorkers` runs each device's backend in a process of its own and measures wall-clock time. `VirtualWorkers` does
the same work in this process and takes the times from the machine's cost model, so that a plan for devices that are
not here can be rehearsed with the real models.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Protocol

from planner.cost import Costs
from planner.errors import UserError
from planner.machine import Device
from planner.runtime.backend import Backend, ModelInfo, Output, Work
from planner.trace import ClockKind
from planner.workflow import Role, RoleName

GROUP = "heteroreason.backends"


@dataclass(frozen=True)
class Done:
    """A chunk that is over."""

    device: str
    output: Output
    start_us: int
    end_us: int


class Workers(Protocol):
    """All devices of a machine. Only `wait` lets time pass."""

    clock: ClockKind

    def load(self, placed: Mapping[RoleName, tuple[str, Role]], delimiter: str) -> dict[RoleName, ModelInfo]:
        """Have each device load the models of the roles that are placed on it, all devices at once."""
        ...

    def encode(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a text. A device that is busy answers after its chunk."""
        ...

    def encode_prompt(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """Token ids of a prompt. The device must be free."""
        ...

    def decode(self, device: str, name: RoleName, tokens: tuple[int, ...]) -> str:
        """Text of token ids. A device that is busy answers after its chunk."""
        ...

    def submit(self, device: str, work: Work, delay_us: int) -> None:
        """Give a free device a chunk; what it needs arrives after `delay_us` (virtual clock only)."""
        ...

    def wait(self, timeout_s: float, until_us: int | None = None) -> Done | None:
        """The next chunk that is over, or None once it is `until_us`, whichever comes first.

        Raises UserError if no chunk is over within `timeout_s`, and whatever the device raised.
        """
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
        return {name: self._backends[device].load(name, role, delimiter) for name, (device, role) in placed.items()}

    def encode(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return self._backends[device].encode(name, text)

    def encode_prompt(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return self._backends[device].encode_prompt(name, text)

    def decode(self, device: str, name: RoleName, tokens: tuple[int, ...]) -> str:
        """See `Workers`."""
        return self._backends[device].decode(name, tokens)

    def submit(self, device: str, work: Work, delay_us: int) -> None:
        """Do the chunk at once and note when it would be over."""
        output = self._backends[device].run(work)
        start = self._now_us + delay_us
        end = start + max(1, self._duration(device, work, output))
        heapq.heappush(self._running, (end, device, Done(device, output, start, end)))

    def wait(self, timeout_s: float, until_us: int | None = None) -> Done | None:
        """Let time pass up to the end of the next chunk, or up to `until_us`."""
        if until_us is not None and (not self._running or self._running[0][0] > until_us):
            self._now_us = max(self._now_us, until_us)
            return None
        end, _, done = heapq.heappop(self._running)
        self._now_us = end
        return done

    def now_us(self) -> int:
        """Modelled microseconds."""
        return self._now_us

    def close(self) -> None:
        """Forget what is running."""
        self._running.clear()


def modelled(costs: Costs) -> Duration:
    """The time of a chunk by a cost model."""

    def duration_us(device: str, work: Work, output: Output) -> int:
        role, total = RoleName(work.role), 0
        if work.feed:
            total += costs.prefill_us(role, device, len(work.feed), work.keep)
        if output.tokens:
            total += costs.decode_us(role, device, len(output.tokens), work.keep + len(work.feed))
        return total

    return duration_us
