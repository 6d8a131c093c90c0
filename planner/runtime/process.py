"""A process for each device: pinned to its core, spoken to over a pipe, ended when the run ends."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from planner.errors import UserError
from planner.machine import Device, DeviceKind, Machine
from planner.runtime.backend import ModelInfo, Work
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
        self._running: set[str] = set()

    def load(self, placed: Mapping[RoleName, tuple[str, Role]], delimiter: str) -> dict[RoleName, ModelInfo]:
        """See `Workers`. A device takes its roles in turn, and answers in the same order."""
        for name, (device, role) in placed.items():
            self._send(device, ("load", (name, role, delimiter)))
        return {name: self._answer(device, LOAD_TIMEOUT_S, "load") for name, (device, _) in placed.items()}

    def encode(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return self._call(device, CALL_TIMEOUT_S, "encode", name, text)

    def encode_prompt(self, device: str, name: RoleName, text: str) -> tuple[int, ...]:
        """See `Workers`."""
        return self._call(device, CALL_TIMEOUT_S, "encode_prompt", name, text)

    def decode(self, device: str, name: RoleName, tokens: tuple[int, ...]) -> str:
        """See `Workers`."""
        return self._call(device, CALL_TIMEOUT_S, "decode", name, tokens)

    def submit(self, device: str, work: Work, delay_us: int) -> None:
        """Send the chunk; the delay is the machine's own."""
        self._send(device, ("run", (work,)))
        self._running.add(device)

    def wait(self, timeout_s: float) -> Done:
        """The first answer of any device."""
        connections = {self._processes[d][1]: d for d in sorted(self._running)}
        ready = wait(list(connections), timeout_s)
        if not ready:
            raise UserError(
                f"{' and '.join(sorted(self._running))} did not answer within {timeout_s:g} s",
                where=f"machine {self._machine.name}",
                mend="run again, or place the roles elsewhere",
            )
        device = connections[ready[0]]  # type: ignore[index]
        self._running.discard(device)
        output, start_us, end_us = self._receive(device)
        return Done(device, output, start_us, end_us)

    def now_us(self) -> int:
        """Monotonic microseconds, the same clock in every process of this computer."""
        return time.monotonic_ns() // 1000

    def close(self) -> None:
        """Ask each process to end, and kill the ones that do not."""
        while self._processes:
            _, (process, connection) = self._processes.popitem()
            with suppress(OSError):  # it may be gone already
                connection.send(None)
            process.join(CLOSE_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
            process.close()
        self._running.clear()

    def _call(self, device: str, timeout_s: float, verb: str, *args: Any) -> Any:
        if device in self._running:
            raise RuntimeError(f"device {device} was asked to {verb} while it is busy")
        self._send(device, (verb, args))
        return self._answer(device, timeout_s, verb)

    def _answer(self, device: str, timeout_s: float, verb: str) -> Any:
        if not self._processes[device][1].poll(timeout_s):
            raise UserError(f"device {device} did not {verb} within {timeout_s:g} s", mend="run again")
        return self._receive(device)

    def _send(self, device: str, message: object) -> None:
        if device not in self._processes:
            self._processes[device] = _start(self._machine.device(device))
        try:
            self._processes[device][1].send(message)
        except OSError:
            raise _lost(device) from None

    def _receive(self, device: str) -> Any:
        try:
            ok, value = self._processes[device][1].recv()
        except (EOFError, OSError):
            raise _lost(device) from None
        if not ok:
            raise value
        return value


def _lost(device: str) -> UserError:
    return UserError(f"the worker of device {device} ended", mend="see its message above, then run again")


def _start(device: Device) -> tuple[BaseProcess, Connection]:
    # A fresh interpreter: forking one in which jax has started its threads can hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, device), name=f"heteroreason-{device.name}", daemon=True)
    process.start()
    theirs.close()
    return process, ours


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
                result = getattr(backend, verb)(*args)
                if verb == "run":
                    result = (result, start, time.monotonic_ns() // 1000)
                connection.send((True, result))
            except UserError as error:
                connection.send((False, error))
            except Exception as error:  # the engine decides what a failing device means
                connection.send((False, RuntimeError(f"device {device.name}: {type(error).__name__}: {error}")))
    except (EOFError, KeyboardInterrupt):
        pass  # the engine is gone, or ends us with it
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
