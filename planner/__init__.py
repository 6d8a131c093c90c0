"""heteroreason: compile speculative reasoning for mixed FPGA and GPU machines, and run it.

import planner
plan = planner.plan("examples/sums.yaml", "this-computer")
result = planner.run(plan, "4123-871+90")
"""

from planner.api import Run, compare, plan, run
from planner.errors import UserError
from planner.machine import Machine
from planner.plan import Plan
from planner.workflow import Workflow

__all__ = ["Machine", "Plan", "Run", "UserError", "Workflow", "compare", "plan", "run"]
