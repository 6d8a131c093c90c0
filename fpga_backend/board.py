"""The core on a board, through pynq. No other file imports pynq.

Works with pynq 3.0.1 and 4.0.0 as they are installed, but for one attribute: see `repair_buffers`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpga_backend.boards.identity import CLOCK, NAME, VERSION, VLNV
from fpga_backend.driver import CoreError
from fpga_backend.packing import PAGE
from fpga_backend.registers import OFFSETS
from planner.errors import UserError

with warnings.catch_warnings():
    # pynq 3.0.1 imports distutils and pkg_resources, which say that they will go, and says that this is no board.
    for kind in (DeprecationWarning, UserWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    import pynq
    from pynq.buffer import PynqBuffer

MEMINFO = Path("/proc/meminfo")
POLL_S = 20e-6
"""Pause between two looks at STATUS: about a tenth of the shortest token."""
GRACE_S = 10.0
"""Added to the time that the cycles of a run may take at the core's clock."""
MEASURED_S = 0.05
"""A run must have taken so long before its clock is judged."""
TOO_FAST = 1.05
"""Times its own clock at which a core is refused: its timing was closed for less, so results may be wrong."""
TOO_SLOW = 0.5


def repair_buffers() -> None:
    """Let pynq 3 and 4 allocate under numpy 2.

    `PynqBuffer.__new__` sets `self.device`. Since numpy 2 arrays have a read-only attribute of that name, so this
    raises AttributeError. A plain attribute of the class hides numpy's, and instances may set theirs again.
    """
    broken = int(np.__version__.split(".")[0]) >= 2 and pynq.__version__.split(".")[0] in ("3", "4")
    if broken and "device" not in vars(PynqBuffer):
        setattr(PynqBuffer, "device", None)  # noqa: B010


repair_buffers()


class BoardBuffer:
    """Physically contiguous memory. The host's side and the core's are apart until one of the transfers."""

    def __init__(self, memory: Any) -> None:
        """`memory`: what `pynq.allocate` gave."""
        self._memory: Any = memory
        self.address = int(memory.device_address)
        self.data: NDArray[np.uint8] = memory.view(np.ndarray)

    def to_device(self) -> None:
        """Flush what the host wrote."""
        self._memory.sync_to_device()

    def from_device(self) -> None:
        """Invalidate the host's copy."""
        self._memory.sync_from_device()

    def free(self) -> None:
        """Give the memory back; the host's side is gone with it. Calling it twice is harmless."""
        if self._memory is not None:
            self.data = np.zeros(0, np.uint8)
            self._memory.freebuffer()
        self._memory = None


class DraftCore(pynq.DefaultIP):
    """The core in a loaded overlay: pynq makes one for each IP of this VLNV. A `driver.Device`.

    `register_map` shows every register by name.
    """

    bindto = (VLNV,)
    grace_s = GRACE_S

    def __init__(self, description: Mapping[str, Any]) -> None:
        """Called by pynq with the core's entry of `ip_dict`. Raises UserError if it does not tell its clock."""
        super().__init__(description=description)
        self.clock_hz = clock_hz(description)

    def wait(self, most_cycles: int) -> bool:
        """Look at STATUS until the run is done; False if it is not after the time of so many cycles.

        Raises UserError if the core runs at another clock than the one that it was built for.
        """
        begin = time.monotonic()
        limit_s = most_cycles / self.clock_hz + self.grace_s
        registers: Any = self.register_map
        while not registers.STATUS.DONE:
            if time.monotonic() - begin > limit_s:
                self._check_clock(time.monotonic() - begin, ended=False)
                return False
            time.sleep(POLL_S)
        self._check_clock(time.monotonic() - begin, ended=True)
        return True

    def allocate(self, size: int) -> BoardBuffer:
        """Contiguous memory of whole pages. Raises UserError, before it is asked for, if there is not that much."""
        size = -(-size // PAGE) * PAGE
        free = contiguous_free(MEMINFO) if self.device.has_capability("MEMORY_MAPPED") else None
        if free is not None and size > free:
            raise too_small(size, f"{free} bytes are free")
        try:
            memory = pynq.allocate((size,), "u1", target=self.device)
        except (RuntimeError, MemoryError, OSError) as error:
            raise too_small(size, f"pynq says: {error}") from error
        if memory.device_address % PAGE:
            raise CoreError(f"pynq gave memory at 0x{memory.device_address:x}, which is no multiple of {PAGE}")
        return BoardBuffer(memory)

    def close(self) -> None:
        """Nothing of its own is held: the overlay stays loaded."""

    def _check_clock(self, elapsed_s: float, ended: bool) -> None:
        if elapsed_s < MEASURED_S:
            return
        found = self.read(OFFSETS["CYCLES"]) / elapsed_s
        if found > TOO_FAST * self.clock_hz or (not ended and found < TOO_SLOW * self.clock_hz):
            built = self.clock_hz / 1e6
            raise UserError(
                f"the FPGA core runs at {found / 1e6:.1f} MHz, its bitstream was built for {built:.1f} MHz",
                mend=f"set pynq.Clocks.fclk0_mhz = {built:g}, or load the bitstream again",
            )


def clock_hz(description: Mapping[str, Any]) -> float:
    """The clock that a core was built for, from its parameters. Raises UserError if they do not tell."""
    text = str(description.get("parameters", {}).get(CLOCK, ""))
    if not text.isdigit() or not int(text):
        raise UserError(
            f"the FPGA core has {CLOCK} {text!r} in the description beside its bitstream",
            mend="build the bitstream with the scripts in fpga_backend/boards, which set it to the clock in Hz",
        )
    return float(text)


def contiguous_free(meminfo: Path) -> int | None:
    """Bytes of contiguous memory (CMA) that are free; None where Linux keeps none apart."""
    text = meminfo.read_text("utf-8") if meminfo.is_file() else ""
    sizes = {line.partition(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith("Cma")}
    return 1024 * int(sizes["CmaFree"]) if int(sizes.get("CmaTotal", 0)) else None


def too_small(size: int, why: str) -> UserError:
    """No memory of `size` bytes."""
    return UserError(
        f"the board has no contiguous memory of {size} bytes: {why}",
        mend="raise cma= in the kernel's command line (bootargs), free other buffers, or lower numerics.cache_tokens",
    )


def open_board(bitstream: Path, device: Any = None) -> DraftCore:
    """Load a bitstream and return its core. `device`: the pynq device, by default the active one.

    Raises UserError with cause and mend if there is no board, no file, or another core in it.
    """
    check_files(bitstream)
    device = device or active_device()
    with warnings.catch_warnings():
        # pynq warns of a core of another version, which is an error here.
        warnings.simplefilter("ignore", UserWarning)
        try:
            overlay = pynq.Overlay(str(bitstream), device=device)
        except Exception as error:  # Parsers and drivers of pynq raise errors of many kinds.
            raise UserError(
                f"pynq cannot load the bitstream: {error}",
                where=str(bitstream),
                mend="run as root on a board of the kind that the bitstream was built for",
            ) from error
    core = getattr(overlay, core_name(overlay.ip_dict, bitstream))
    core.overlay = overlay
    return core


def check_files(bitstream: Path) -> None:
    """Raise UserError unless the bitstream and, for a .bit or .bin, its description are there."""
    needed = [bitstream] if bitstream.suffix == ".xclbin" else [bitstream, bitstream.with_suffix(".hwh")]
    for path in needed:
        if not path.is_file():
            raise UserError(
                "there is no such file",
                where=str(path),
                mend="build it with the scripts in fpga_backend/boards; the .hwh lies beside the .bit, equally named",
            )


def active_device() -> Any:
    """The device that pynq found. Raises UserError if it found none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return pynq.Device.active_device
        except RuntimeError as error:
            raise no_device(str(error), os.environ) from error


def no_device(said: str, environment: Mapping[str, str]) -> UserError:
    """Why pynq may have found no device."""
    if "XILINX_XRT" not in environment:
        return UserError(
            f"pynq finds no FPGA ({said}), and XILINX_XRT is not set, without which it finds none even on a board",
            mend="on the board: source /etc/profile.d/xrt_setup.sh and pynq_venv.sh; elsewhere use transport: rtl",
        )
    return UserError(
        f"pynq finds no FPGA ({said})",
        mend="run as root on a board that pynq supports, or use transport: rtl to simulate one",
    )


def core_name(ip_dict: Mapping[str, Mapping[str, Any]], bitstream: Path) -> str:
    """The only core among the IP of an overlay. Raises UserError if there is none, another version, or several."""
    versions = {name: str(ip["type"]) for name, ip in ip_dict.items() if f":{NAME}:" in str(ip.get("type"))}
    right = [name for name, vlnv in versions.items() if vlnv == VLNV]
    if len(right) == 1:
        return right[0]
    found = ", ".join(sorted(versions.values())) or "none"
    raise UserError(
        f"the bitstream must have one {NAME} {VERSION}, it has {found}",
        where=str(bitstream),
        mend="build it from this version's RTL with the scripts in fpga_backend/boards",
    )
