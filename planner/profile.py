"""Measured costs: each role is timed on a device of this computer, in the same worker process that a run would use.

Chunks of several lengths, after several lengths of context, are timed one by one. The median of each goes into a
fit of the same terms that cost tables have; a device that reads in blocks takes steps, which the line goes through.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from planner.cost import CostEntry, CostOp, CostTable, Fit, Origin
from planner.errors import UserError
from planner.fit import robust
from planner.machine import Machine
from planner.runtime.backend import ModelInfo, Work
from planner.runtime.process import ProcessWorkers
from planner.runtime.worker import Done, Workers
from planner.workflow import Role, RoleName

LENGTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048)
"""Tokens of a chunk that are tried, as far as the context allows."""
CONTEXTS = (0.0, 0.25, 0.5)
"""Shares of the context that are full before a chunk."""
CHUNK_LIMIT_US = 120_000_000
"""Longest wait for a chunk."""


@dataclass(frozen=True)
class Sample:
    """Timings of one kind of chunk."""

    role: RoleName
    device: str
    op: CostOp
    tokens: int
    """Read or written."""
    context: int
    """Tokens before them."""
    us: tuple[int, ...]
    sent_us: tuple[int, ...] = ()
    """How much longer the chunk took for who sent it than for the device."""

    @property
    def median_us(self) -> float:
        """The middle of the timings."""
        return float(np.median(self.us))

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, as a share of the median."""
        low, high = np.percentile(self.us, (25, 75))
        return float((high - low) / 2 / self.median_us)


def profile(
    machine: Machine,
    placed: Sequence[tuple[RoleName, Role, str]],
    delimiter: str,
    *,
    repeats: int = 7,
    limit_s: float = 30.0,
) -> tuple[CostTable, list[Sample]]:
    """Time each role on its device, one after another. `limit_s` bounds the timing of one role on one device.

    A role that the device's kind of model does not allow raises UserError, as in a run.
    """
    samples: list[Sample] = []
    for name, role, device in placed:
        check_device(machine, device)
        with closing(ProcessWorkers(machine)) as workers:
            info = workers.load({name: (device, role)}, delimiter)[name]
            samples += measure(workers, name, device, info, repeats=repeats, limit_s=limit_s)
    return table(samples, machine), samples


def check_device(machine: Machine, device: str) -> None:
    """Raise UserError for a device whose times on this computer say nothing of it."""
    transport = machine.device(device).transport
    if transport is not None and transport != "board":
        raise UserError(
            f"device {device} is emulated, its times here would be those of the emulator",
            where=f"machine {machine.name}",
            mend="profile another device; costs of this one are modelled",
        )


def measure(
    workers: Workers, name: RoleName, device: str, info: ModelInfo, *, repeats: int, limit_s: float
) -> Iterator[Sample]:
    """Samples of one loaded role, reading first. Each kind of chunk is done once before it is timed."""
    until = time.monotonic() + limit_s
    room = info.context_tokens - 1
    for op in CostOp:
        if op == CostOp.DECODE and name == RoleName.PRM:
            return
        for tokens in LENGTHS:
            for share in CONTEXTS:
                context = max(int(share * room), int(op == CostOp.DECODE))
                if context + tokens > room or (time.monotonic() > until and tokens > 2):
                    continue
                sample = _timed(workers, name, device, op, tokens, context, repeats)
                if sample is not None:
                    yield sample


def table(samples: Sequence[Sample], machine: Machine) -> CostTable:
    """A cost table of the samples' medians. Raises UserError where there are too few."""
    entries, fits = [], []
    for role, device in dict.fromkeys((s.role, s.device) for s in samples):
        own = [s for s in samples if (s.role, s.device) == (role, device)]
        processor = machine.device(device).kind_of_processor
        source = f"heteroreason profile on {device} ({processor}), medians of {max(len(s.us) for s in own)}"
        errors, total, seen, left_out = [], 0.0, 0.0, 0
        for op in CostOp:
            those = [s for s in own if s.op == op]
            if not those:
                continue
            entry, kept = _entry(those, source)
            entries.append(entry)
            left_out += len(those) - len(kept)
            fitted = [entry.us(s.tokens, s.context) for s in kept]
            errors += [abs(f / s.median_us - 1) for f, s in zip(fitted, kept, strict=True)]
            total, seen = total + sum(fitted), seen + sum(s.median_us for s in kept)
        fits.append(Fit(role, device, len(own), left_out, float(np.median(errors)), total / seen - 1))
    sent = [us for sample in samples for us in sample.sent_us]
    dispatch_us = float(np.median(sent)) if sent else None
    return CostTable(tuple(entries), f"measured on {machine.name}", fits=tuple(fits), dispatch_us=dispatch_us)


def _entry(samples: Sequence[Sample], source: str) -> tuple[CostEntry, list[Sample]]:
    """Factors by least squares of relative errors, so that short chunks count as much as long ones."""
    first = samples[0]
    us = np.array([s.median_us for s in samples])
    tokens, context = (np.array([getattr(s, key) for s in samples], float) for key in ("tokens", "context"))
    before = context if first.op == CostOp.PREFILL else tokens * context + tokens * (tokens - 1) / 2
    terms = np.stack([np.ones(len(us)), tokens, before], axis=1)
    factors, kept = robust(terms / us[:, None], np.ones(len(us)))
    base, each, far = (round(float(f), 4) for f in factors)
    entry = CostEntry(
        first.role, first.device, first.op, each, source,
        base_us=base, per_context_us=far, origin=Origin.MEASURED,
    )  # fmt: skip
    return entry, [s for s, k in zip(samples, kept, strict=True) if k]


def _timed(
    workers: Workers, name: RoleName, device: str, op: CostOp, tokens: int, context: int, repeats: int
) -> Sample | None:
    """One sample. Writing may end early at the end of a step: then it is a sample of fewer tokens."""
    work = _work(name, op, tokens, context)
    times: list[int] = []
    sent: list[int] = []
    written = 0
    for attempt in range(repeats + 1):
        _do(workers, device, Work(name.value, "profile", 0, _tokens(context)))
        begun = workers.now_us()
        done = _do(workers, device, work)
        whole = workers.now_us() - begun
        written = len(done.output.tokens)
        if attempt:
            times.append(max(1, done.end_us - done.start_us))
            sent.append(whole - (done.end_us - done.start_us))
    counted = tokens if op == CostOp.PREFILL else written
    return Sample(name, device, op, counted, context, tuple(times), tuple(sent)) if counted else None


def _work(name: RoleName, op: CostOp, tokens: int, context: int) -> Work:
    if op == CostOp.DECODE:
        # Hot enough that few steps end early, whatever the model makes of such a prompt.
        return Work(name.value, "profile", context, (), tokens, key=1000 * tokens + context, temperature=5.0)
    score = (context + tokens - 1,) if name == RoleName.PRM else ()
    return Work(name.value, "profile", context, _tokens(tokens), score=score)


def _do(workers: Workers, device: str, work: Work) -> Done:
    workers.submit(device, work, 0, CHUNK_LIMIT_US)
    done = workers.wait()
    assert done is not None, "without a time to wait until there is always a chunk"
    if done.fault is not None:
        raise UserError(f"device {device}: {done.fault.kind}: {done.fault.what}", mend="profile another device")
    return done


def _tokens(count: int) -> tuple[int, ...]:
    """Ids that every vocabulary has. What they mean does not matter to the time."""
    return tuple(2 + i * 7 % 9 for i in range(count))


def devices_of(
    machine: Machine, roles: Mapping[RoleName, Role], device: str | None
) -> list[tuple[RoleName, Role, str]]:
    """Each role on `device`, else on every device of the machine that it may be placed on and that can be timed."""
    found = []
    for name, role in roles.items():
        for candidate in machine.candidates(role.numerics):
            emulated = candidate.transport is not None and candidate.transport != "board"
            if candidate.name == device or (device is None and not emulated):
                found.append((name, role, candidate.name))
    if not found:
        what = "no role can be timed" if device is None else f"no role of the workflow can run on {device}"
        machine.device(device or machine.devices[0].name)
        raise UserError(what, where=f"machine {machine.name}", mend="name another device or machine")
    return found
