"""Processes of our own: Ctrl-C does not reach them, and no message to or from one is waited for without end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from planner.stopping import STOPS

PIPE_TIMEOUT_S = 60
"""Longest wait, in whole seconds, for a process to take the rest of a message, or to send it."""


def start(target: Callable[..., None], args: tuple[Any, ...], name: str) -> tuple[BaseProcess, Connection]:
    """A process that runs `target` on its end of a pipe and `args`, and our end."""
    # A fresh interpreter: forking one in which jax has started its threads can hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
    start_unheard(process)
    theirs.close()
    limit(ours)
    return process, ours


def start_unheard(process: BaseProcess) -> None:
    """Start a process that Ctrl-C does not reach, though the terminal sends it to all: our own end is what ends it.

    A signal that comes meanwhile is heard when the process has all that it needs to begin.
    """
    if not hasattr(signal, "pthread_sigmask"):
        process.start()
        return
    from multiprocessing import resource_tracker  # posix only

    with _heard_later():
        resource_tracker.ensure_running()  # the first process would start it, and starting it lets the signals through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()  # it begins with the signal blocked, and stays so
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _heard_later() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM back. Blocking them is not enough: threads of libraries take them for this one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is told of signals
        return
    heard: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in heard[:1]:
            signal.raise_signal(number)


def limit(connection: Connection) -> None:
    """Have a message fail that the other side has no room for, or stops in the middle of, as a stopped process does."""
    if sys.platform == "win32":
        return
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PIPE_TIMEOUT_S, 0))
