"""Every policy, and options of it, with the models that ship, on 300 fresh problems of each set. Accuracy is measured.

Give a number to take other than 300, and the first letters of cases to run only those.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from models_jax.self_score import FILE_NAME
from planner.api import as_workflow
from planner.checkpoint import model_folder
from planner.evaluate import evaluate_cases
from planner.problems import problem_set
from planner.show import evaluation_note, evaluation_table
from planner.workflow import Policy, RoleName, Sampling, SelfScore, Workflow

EXAMPLES = Path(__file__).parent.parent / "examples"
SEED = 1_000_000
DRAFTS = Sampling(draft_temperature=0.7)
SAMPLED = Sampling(temperature=0.7)


def cases(flow: Workflow, scratch: Path) -> Iterator[tuple[str, Workflow]]:
    """The policies by themselves, then each option where it may tell."""

    def with_(kind: Policy, sampling: Sampling = flow.sampling, **options: object) -> Workflow:
        return replace(flow, policy=replace(flow.policy, kind=kind, **options), sampling=sampling)

    for kind in Policy:
        yield kind, with_(kind)
    plain = with_(Policy.SPECREASON)
    target = replace(plain.roles[RoleName.TARGET], model=str(without_head(scratch)))
    by_digits = replace(plain, roles={**plain.roles, RoleName.TARGET: target})
    yield "specreason, the target's own digits", by_digits
    likeliest = replace(by_digits.policy, self_score=SelfScore.DIGIT)
    yield "specreason, the likeliest digit", replace(by_digits, policy=likeliest)
    for kind in (Policy.SPECREASON, Policy.RSD):
        yield f"{kind}, first step by the target", with_(kind, first_target_steps=1)
    for kind in (Policy.SPECREASON, Policy.RSD):
        yield f"{kind}, best of 3 drafts at 0.7", with_(kind, DRAFTS, drafts=3)
    yield "backtrack, 2 further alternatives", with_(Policy.BACKTRACK, resample_alternatives=2)
    yield "target_only at 0.7", with_(Policy.TARGET_ONLY, SAMPLED)
    yield "target_only at 0.7, vote of 5", with_(Policy.TARGET_ONLY, SAMPLED, vote=5)
    yield "rsd at 0.7", with_(Policy.RSD, SAMPLED)
    yield "rsd at 0.7, vote of 5", with_(Policy.RSD, SAMPLED, vote=5)


COMPARED = (
    ("backtrack", "rsd"),
    ("specreason", "rsd"),
    ("specreason", "target_only"),
    ("specreason", "specreason, the target's own digits"),
    ("specreason, best of 3 drafts at 0.7", "specreason"),
    ("rsd, best of 3 drafts at 0.7", "rsd"),
    ("backtrack, 2 further alternatives", "backtrack"),
    ("target_only at 0.7, vote of 5", "target_only at 0.7"),
    ("rsd at 0.7, vote of 5", "rsd at 0.7"),
)


def without_head(scratch: Path) -> Path:
    """The target that ships without its self-score head: it answers the score prompt with digits."""
    copy = scratch / "target"
    if not copy.exists():
        shutil.copytree(model_folder("zoo/target"), copy, ignore=shutil.ignore_patterns(FILE_NAME))
    return copy


def main() -> None:
    """Print the table and the paired tests of each set."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    chosen = tuple(sys.argv[2:])
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("sums", "countdown"):
            flow = as_workflow(EXAMPLES / f"{name}.yaml")
            problems = problem_set(flow.problems).generate(count, SEED)
            these = {str(k): v for k, v in cases(flow, Path(scratch)) if not chosen or str(k).startswith(chosen)}
            found = evaluate_cases(these, problems, compared=COMPARED)
            console.print(evaluation_table([found]))
            console.print(evaluation_note(found), highlight=False)


if __name__ == "__main__":
    main()
