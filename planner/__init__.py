"""heteroreason: compile speculative reasoning for mixed FPGA and GPU machines, and run it.

import planner

plan = planner.plan("examples/sums.yaml", "u280-2x3090")
result = planner.run(plan, "4123-871+90", clock="virtual")
"""

# Imported here and not when first asked for: the function `plan` must take the place of the module of that name.
import logging

from planner.api import Run, compare, plan, run
from planner.errors import UserError
from planner.machine import Machine
from planner.plan import Plan
from planner.workflow import Workflow

__all__ = ["Machine", "Plan", "Run", "UserError", "Workflow", "compare", "plan", "run"]

# Quiet until the program that uses it sets logging up.
logging.getLogger(__name__).addHandler(logging.NullHandler())
