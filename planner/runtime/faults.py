"""What can go wrong with a device, and how it is told from a good answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.errors import UserError
from planner.machine import Machine
from planner.runtime.backend import Output, Sibling, Work


class FaultKind(StrEnum):
    """What a device did wrong."""

    RAISED = "raised"
    """The backend raised an exception."""
    MEMORY = "out of memory"
    BAD_OUTPUT = "bad output"
    """No tokens, too many of them, a score that is no probability, the wrong number of scores, or half a cache."""
    HUNG = "hung"
    """No answer within the time that the chunk, the load or the call may take."""
    DIED = "died"
    REFUSED = "refused to load"


LAST = frozenset({FaultKind.HUNG, FaultKind.DIED, FaultKind.REFUSED})
"""Faults after which the device is not tried again."""


@dataclass(frozen=True)
class Fault:
    """One of them, and what is known of it."""

    kind: FaultKind
    what: str
    """For people, on one line."""
    error: Exception | None = None
    """What the backend raised."""


class DeviceFault(Exception):
    """A call to a device failed. A backend may raise it itself, without a name, if it knows that its device is gone."""

    def __init__(self, fault: Fault, device: str = "") -> None:
        """The fault, and the device that has it."""
        self.fault, self.device = fault, device
        self.others: tuple[DeviceFault, ...] = ()
        """Faults of other devices that were asked at the same time."""
        super().__init__(f"device {device}: {fault.kind}: {fault.what}")

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the fields when the error crosses a process border."""
        return (DeviceFault, (self.fault, self.device))


def fault_of(error: Exception) -> Fault:
    """The fault that an exception of a backend stands for."""
    if isinstance(error, DeviceFault):
        return error.fault
    text = " ".join(str(error).split())
    memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    what = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
    return Fault(FaultKind.MEMORY if memory else FaultKind.RAISED, what, error)


def wrong_output(work: Work, output: Output, kv_bytes: int) -> Fault | None:
    """What is wrong with a chunk's output; None if it is one that the chunk may have.

    `kv_bytes` is what a token takes in the cache of the role.
    """
    tokens, scores = output.tokens, output.scores
    if len(output.beside) != len(work.beside):
        what = f"{len(output.beside)} further drafts came where {len(work.beside)} were asked for"
        return Fault(FaultKind.BAD_OUTPUT, what)
    for draft, most in ((tokens, work.max_new), *((o.tokens, s.max_new) for o, s in _beside(work, output))):
        if not (len(draft) <= most and (draft or not most)):
            asked = f"1 to {most}" if most else "none"
            return Fault(FaultKind.BAD_OUTPUT, f"{len(draft)} tokens came where {asked} were asked for")
        if not all(isinstance(token, int) and token >= 0 for token in draft):
            return Fault(FaultKind.BAD_OUTPUT, f"{draft} are no token ids")
    if work.hand_over and output.handed is None:
        return Fault(FaultKind.BAD_OUTPUT, "no cache came where one was asked for")
    if output.handed is not None and (
        output.handed.tokens[work.keep :] != (*work.feed, *tokens)
        or len(output.handed.rows) not in (0, kv_bytes * len(output.handed.tokens))  # stand-ins hand over none
    ):
        return Fault(FaultKind.BAD_OUTPUT, "the cache that came is not that of the tokens that were read")
    if len(scores) != len(work.score):
        return Fault(FaultKind.BAD_OUTPUT, f"{len(scores)} scores came where {len(work.score)} were asked for")
    if not all(0.0 <= score <= 1.0 for score in scores):
        return Fault(FaultKind.BAD_OUTPUT, f"the scores {scores} are not all from 0 to 1")
    return None


def _beside(work: Work, output: Output) -> Iterator[tuple[Output, Sibling]]:
    return zip(output.beside, work.beside, strict=True)


def without(machine: Machine, device: str) -> Machine:
    """The machine after it lost a device. It may be left without any."""
    devices = tuple(d for d in machine.devices if d.name != device)
    links = tuple(link for link in machine.links if device not in (link.a, link.b))
    return replace(machine, devices=devices, links=links)


def with_device(machine: Machine, device: str, whole: Machine) -> Machine:
    """The machine with a device of `whole` again, its links to those that are there too."""
    names = {d.name for d in machine.devices} | {device}
    gone = {d.name for d in whole.devices} - names
    devices = tuple(d for d in whole.devices if d.name in names)
    links = tuple(link for link in whole.links if not gone & {link.a, link.b})
    return replace(machine, devices=devices, links=links)
