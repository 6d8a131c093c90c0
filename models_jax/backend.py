"""The `jax` backend: float and integer models on the CPU or GPU that JAX sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from models_jax.device import choose_devices
from models_jax.float_runner import FloatRunner
from models_jax.placement import Placement
from models_jax.profiling import Profile
from models_jax.runner import ModelRunner
from planner.checkpoint import model_folder
from planner.errors import UserError
from planner.runtime.backend import Handed, ModelInfo, Output, Work
from planner.workflow import Arithmetic, Role


class JaxBackend:
    """One JAX device, or several that compute together. Roles are loaded by name; each has its own sequences."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """Options: `platform` (cpu, gpu; default is JAX's own choice) and `devices`, indices among them: "0", "0,1"."""
        self._devices = choose_devices(options or {})
        self._runners: dict[str, ModelRunner] = {}
        self._profile = Profile()

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        """Load and compile the model of role `name`, in place of one loaded before."""
        folder = model_folder(role.model)
        self.unload(name)
        if role.numerics.arithmetic is Arithmetic.INT8:
            from models_jax.integer.runner import IntegerRunner

            runner: ModelRunner = IntegerRunner(name, role, folder, delimiter, self._devices[0])
        else:
            runner = FloatRunner(name, role, folder, delimiter, self._placement(name, role.numerics.tensor_parallel))
        self._runners[name] = runner
        return runner.info

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of `text` for role `name`."""
        return self._runner(name).encode(text)

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of the prompt `text` for role `name`."""
        return self._runner(name).encode_prompt(text)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """Text of `tokens` of role `name`."""
        return self._runner(name).decode(tokens)

    def run(self, work: Work) -> Output:
        """Do one chunk."""
        with self._profile.unit(work):
            return self._runner(work.role).run(work)

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of a sequence; with 0 its cache is freed."""
        self._runner(name).rewind(sequence, tokens)

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a known sequence, in place of what it was."""
        self._runner(name).fork(sequence, new_sequence)

    def hand_over(self, name: str, sequence: str) -> Handed:
        """What a known sequence of a role that writes holds."""
        return self._runner(name).hand_over(sequence)

    def take_over(self, name: str, sequence: str, handed: Handed) -> None:
        """Make a sequence of a role that writes what another device has handed over."""
        self._runner(name).take_over(sequence, handed)

    def unload(self, name: str) -> None:
        """Free a role's model and sequences, if it is loaded."""
        runner = self._runners.pop(name, None)
        if runner is not None:
            runner.close()

    def close(self) -> None:
        """Free all models; calling it twice is harmless."""
        self._profile.close()
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()

    def _placement(self, name: str, count: int) -> Placement:
        if count > len(self._devices):
            raise UserError(
                f"role {name!r} is to be spread over {count} devices and this one has {len(self._devices)}",
                mend="name as many in processors of the machine file, or lower numerics.tensor_parallel",
            )
        return Placement(self._devices[:count])

    def _runner(self, name: str) -> ModelRunner:
        runner = self._runners.get(name)
        if runner is None:
            raise ValueError(f"role {name!r} is not loaded here")
        return runner
