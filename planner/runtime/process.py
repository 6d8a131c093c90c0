"""A process for each device: pinned to its core, spoken to over a pipe, ended when the run ends."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from planner.errors import UserError
from planner.machine import Device, DeviceKind, Machine
from planner.runtime import child
from planner.runtime.backend import ModelInfo, Output, Work, perform
from planner.runtime.faults import DeviceFault, Fault, FaultKind, fault_of
from planner.runtime.worker import Done, make_backend
from planner.trace import ClockKind
from planner.workflow import Role, RoleName

LOAD_TIMEOUT_S = 300.0
"""Longest wait for a model to be loaded and compiled."""
CALL_TIMEOUT_S = 60.0
"""Longest wait for a tokenizer."""
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for a process to end by itself before it is killed."""


class ProcessWorkers:
    """Wall-clock time on the devices of this computer."""

    clock = ClockKind.WALL

    def __init__(self, machine: Machine) -> None:
        """Processes start when their device is first used."""
        self._machine = machine
        self._processes: dict[str, tuple[BaseProcess, Connection]] = {}
        self._running: dict[str, tuple[int, int]] = {}
        """When the chunk of each device began, and when it must be over."""
        self._over: deque[Done] = deque()
        """Chunks whose end was seen while something else was waited for."""

    def load(self, placed: Mapping[RoleName, tuple[str, Role]], delimiter: str) -> dict[RoleName, ModelInfo]:
        """See `Workers`. A device takes its roles in turn, and answers in the same order."""
        found, lost = {}, {}
        for name, (device, role) in placed.items():
            with _kept(lost):
                self._send(device, ("load", (name, role, delimiter)))
        for name, (device, _) in placed.items():
            # Every answer is taken, so that no later call meets one of these.
            if device not in lost or lost[device].fault.kind is FaultKind.REFUSED:
                with _kept(lost):
                    found[name] = self._answer(device, LOAD_TIMEOUT_S, "load")
        if lost:
            failed, *others = lost.values()
            failed.others = tuple(others)
            raise failed
        return found

    def unload(self, device: str, name: RoleName) -> None:
        """See `Workers`."""
        if device in self._processes:
            self._call(device, CALL_TIMEOUT_S, "unload", name)

    def encode(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return self._call(device, CALL_TIMEOUT_S, "encode", name, text)

    def encode_prompt(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return self._call(device, CALL_TIMEOUT_S, "encode_prompt", name, text)

    def submit(self, device: str, work: Work, delay_us: int, limit_us: int) -> None:
        """Send the chunk; the delay is the machine's own."""
        now = self.now_us()
        try:
            self._send(device, ("run", (work,)))
        except DeviceFault as lost:
            self._over.append(Done(device, Output(), now, now, lost.fault))
        else:
            self._running[device] = (now, now + limit_us)

    def wait(self, until_us: int | None = None) -> Done | None:
        """The first answer of any device."""
        if self._over:
            return self._over.popleft()
        ends = [end for _, end in self._running.values()]
        next_us = min(ends if until_us is None else [*ends, until_us])
        connections: dict[Any, str] = {self._processes[d][1]: d for d in sorted(self._running)}
        ready = wait(list(connections), max(0.0, (next_us - self.now_us()) / 1e6))
        if ready:
            return self._finish(connections[ready[0]])
        for device, (start, end) in sorted(self._running.items()):
            if end <= self.now_us():
                fault = Fault(FaultKind.HUNG, f"a chunk was not over after {(end - start) / 1e6:g} s")
                self.drop(device)
                return Done(device, Output(), start, self.now_us(), fault)
        return None

    def drop(self, device: str) -> None:
        """See `Workers`: the process is killed."""
        self._running.pop(device, None)
        self._over = deque(done for done in self._over if done.device != device)
        if device in self._processes:
            process, connection = self._processes.pop(device)
            process.kill()
            process.join(CLOSE_TIMEOUT_S)
            if not process.is_alive():
                process.close()
            connection.close()

    def now_us(self) -> int:
        """Monotonic microseconds, the same clock in every process of this computer."""
        return time.monotonic_ns() // 1000

    def close(self) -> None:
        """Ask each process to end, and kill the ones that do not."""
        for _, connection in self._processes.values():
            with suppress(OSError):  # it may be gone already
                connection.send(None)
        until = time.monotonic() + (0.0 if self._running else CLOSE_TIMEOUT_S)
        for process, _ in self._processes.values():
            process.join(max(0.0, until - time.monotonic()))
        for device in list(self._processes):
            self.drop(device)
        self._over.clear()

    def _finish(self, device: str) -> Done:
        """Receive what a device did."""
        start, _ = self._running.pop(device)
        try:
            output, start_us, end_us = self._receive(device)
            return Done(device, output, start_us, end_us)
        except DeviceFault as failed:
            return Done(device, Output(), start, self.now_us(), failed.fault)
        except UserError as error:
            return Done(device, Output(), start, self.now_us(), fault_of(error))

    def _call(self, device: str, timeout_s: float, verb: str, *args: Any) -> Any:
        if device in self._running:
            # First the chunk, which `wait` hands out later: a process that is at work takes no long message.
            self._await(device, (self._running[device][1] - self.now_us()) / 1e6, "run")
            self._over.append(self._finish(device))
        self._send(device, (verb, args))
        return self._answer(device, timeout_s, verb)

    def _answer(self, device: str, timeout_s: float, verb: str) -> Any:
        self._await(device, timeout_s, verb)
        try:
            return self._receive(device)
        except UserError as error:
            if verb == "load":
                raise DeviceFault(replace(fault_of(error), kind=FaultKind.REFUSED), device) from error
            raise
        except DeviceFault as failed:
            refused = verb == "load" and failed.fault.kind is not FaultKind.DIED
            raise DeviceFault(replace(failed.fault, kind=FaultKind.REFUSED), device) if refused else failed from None

    def _await(self, device: str, timeout_s: float, verb: str) -> None:
        if not self._processes[device][1].poll(max(0.0, timeout_s)):
            raise DeviceFault(Fault(FaultKind.HUNG, f"it did not {verb} within {timeout_s:g} s"), device)

    def _send(self, device: str, message: tuple[str, tuple[Any, ...]]) -> None:
        if device not in self._processes:
            args = (self._machine.device(device),)
            self._processes[device] = child.start(_serve, args, f"heteroreason-{device}")
        try:
            self._processes[device][1].send(message)
        except BlockingIOError:
            raise _stuck(device) from None
        except OSError:
            raise self._dead(device) from None

    def _receive(self, device: str) -> Any:
        try:
            good, result = self._processes[device][1].recv()
        except BlockingIOError:
            raise _stuck(device) from None
        except (EOFError, OSError):
            raise self._dead(device) from None
        if not good:
            raise result if isinstance(result, UserError) else DeviceFault(result, device)
        return result

    def _dead(self, device: str) -> DeviceFault:
        process = self._processes[device][0]
        process.join(CLOSE_TIMEOUT_S)
        return DeviceFault(Fault(FaultKind.DIED, f"its process ended with exit code {process.exitcode}"), device)


def _stuck(device: str) -> DeviceFault:
    what = f"a message to or from it was not over after {child.PIPE_TIMEOUT_S} s"
    return DeviceFault(Fault(FaultKind.HUNG, what), device)


@contextmanager
def _kept(lost: dict[str, DeviceFault]) -> Iterator[None]:
    """Note the first fault of each device instead of raising it."""
    try:
        yield
    except DeviceFault as failed:
        lost.setdefault(failed.device, failed)


def _serve(connection: Connection, device: Device) -> None:
    """The worker's loop: answer (True, result) or (False, error) to each message, until None or a closed pipe."""
    _settle(device)
    backend = None
    try:
        while (message := connection.recv()) is not None:
            verb, args = message
            try:
                backend = backend or make_backend(device)
                start = time.monotonic_ns() // 1000
                if verb == "run":
                    result: Any = (perform(backend, *args), start, time.monotonic_ns() // 1000)
                else:
                    result = getattr(backend, verb)(*args)
                connection.send((True, result))
            except UserError as error:
                connection.send((False, error))
            except Exception as error:  # the engine decides what a failing device means
                # The exception itself may not survive the way.
                connection.send((False, replace(fault_of(error), error=None)))
    except (EOFError, OSError):
        pass  # the engine is gone
    finally:
        if backend:
            backend.close()


def _settle(device: Device) -> None:
    """Pin the process to the device's core, and keep other processors out of its sight."""
    if device.core is not None and hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {device.core} if device.core in cores else cores)
    if device.kind is not DeviceKind.GPU:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if device.core is not None:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
