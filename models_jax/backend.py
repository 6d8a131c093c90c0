"""The `jax` backend: float and integer models on the CPU or GPU that JAX sees."""

from __future__ import annotations

from collections.abc import Mapping

from models_jax.device import choose_devices
from models_jax.float_runner import FloatRunner
from models_jax.placement import Placement
from models_jax.profiling import Profile
from models_jax.runner import ModelRunner
from models_jax.runner_backend import RunnerBackend
from planner.checkpoint import model_folder
from planner.errors import UserError
from planner.runtime.backend import ModelInfo, Output, Work
from planner.workflow import Arithmetic, Role


class JaxBackend(RunnerBackend):
    """One JAX device, or several that compute together. Roles are loaded by name; each has its own sequences."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """Options: `platform` (cpu, gpu; default is JAX's own choice) and `devices`, indices among them: "0", "0,1"."""
        super().__init__()
        self._devices = choose_devices(options or {})
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

    def run(self, work: Work) -> Output:
        """Do one chunk."""
        with self._profile.unit(work):
            return super().run(work)

    def close(self) -> None:
        """Write the profile, and free all models; calling it twice is harmless."""
        self._profile.close()
        super().close()

    def _placement(self, name: str, count: int) -> Placement:
        if count > len(self._devices):
            raise UserError(
                f"role {name!r} is to be spread over {count} devices and this one has {len(self._devices)}",
                mend="name as many in processors of the machine file, or lower numerics.tensor_parallel",
            )
        return Placement(self._devices[:count])
