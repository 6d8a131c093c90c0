"""The simulated core as a device for the driver: its memory is dealt out in pages, apart from the host's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fpga_backend.core import Core
from fpga_backend.packing import PAGE
from fpga_backend.simulation.simulator import Memory, Simulator
from planner.errors import UserError

MEMORY_BYTES = 1 << 30
"""Memory of a simulated board. Pages that nothing touches cost nothing."""


class SimulatedBuffer:
    """Pages of simulated memory with a copy on the host."""

    def __init__(self, memory: NDArray[np.uint8], address: int, free: Callable[[int, int], None]) -> None:
        """`memory`: the pages; `free` is called with the address and the size."""
        self.address, self.data = address, np.zeros(memory.size, np.uint8)
        self._memory, self._free = memory, free

    def to_device(self) -> None:
        """Copy the host's side into simulated memory."""
        self._memory[:] = self.data

    def from_device(self) -> None:
        """Copy simulated memory to the host's side."""
        self.data[:] = self._memory

    def free(self) -> None:
        """Give the pages back."""
        self._free(self.address, self.data.size)


class SimulatedDevice:
    """A simulator with an allocator for its memory."""

    def __init__(self, simulator: Simulator) -> None:
        """Everything but the first page is free: address 0 is never given out."""
        self.simulator = simulator
        self._holes = [(PAGE, simulator.memory.size - PAGE)]

    def read(self, offset: int) -> int:
        """Read a register."""
        return self.simulator.read(offset)

    def write(self, offset: int, value: int) -> None:
        """Write a register."""
        self.simulator.write(offset, value)

    def wait(self, most_cycles: int) -> bool:
        """Let cycles pass until the core is done."""
        return self.simulator.run(most_cycles)

    def close(self) -> None:
        """Free the simulation; calling it twice is harmless."""
        self.simulator.close()

    def allocate(self, size: int) -> SimulatedBuffer:
        """The first hole that is large enough. Raises UserError if there is none."""
        size = -(-size // PAGE) * PAGE
        for i, (address, room) in enumerate(self._holes):
            if room >= size:
                self._holes[i : i + 1] = [(address + size, room - size)] if room > size else []
                return SimulatedBuffer(self.simulator.memory[address : address + size], address, self._release)
        raise UserError(
            f"the memory of the simulated FPGA has no {size} bytes left, of {self.simulator.memory.size}",
            mend="let fewer sequences live at once: lower the window or the number of alternatives",
        )

    def _release(self, address: int, size: int) -> None:
        holes = sorted([*self._holes, (address, size)])
        joined = holes[:1]
        for start, room in holes[1:]:
            last, length = joined[-1]
            if last + length == start:
                joined[-1] = (last, length + room)
            else:
                joined.append((start, room))
        self._holes = joined


def simulated_device() -> SimulatedDevice:
    """The core as the transport `rtl` simulates it: the default core, memory that answers after 100 cycles."""
    simulator = Simulator(Core(), MEMORY_BYTES)
    simulator.behave(Memory())
    return SimulatedDevice(simulator)
