"""Workflow -> TaskGraph: the window of the first `rounds` steps of a problem, nothing speculative yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.graph import Edge, Guard, Literal, Op, Task, TaskGraph, Verdict, verify
from planner.workflow import NEEDED_ROLES, VERIFIER, Policy, RoleName, Workflow


def lower(workflow: Workflow, rounds: int = 3, steady: bool = False) -> TaskGraph:
    """The conditional task graph of `rounds` rounds of the workflow's policy, from the prompt on.

    A `steady` window lies amid a problem instead, as many rounds from its beginning as from its end: prompts are read,
    and each outcome goes on to the first step of the next round, so that what runs ahead across the window's end
    counts as what ran ahead across its beginning does. What roles have to catch up with then is the mean.

    A round is one pass through the policy's loop. The outcomes of a round are accepted (A), refined (R) and, for
    the policy `backtrack`, backtracked (B). Task ids carry the outcomes of the rounds before: `draft.AR` drafts the
    third step after one accepted and one refined. Several drafts of a step are one longer task, and so is their
    check. A backtrack ends the window on its branch: where it leads to depends on more than the window, and what
    follows costs the same under every plan.
    """
    builder = _Builder(workflow, rounds, steady)
    if not steady:
        builder.prefill()
    builder.round(_Node(history="", guard=(), writer=None))
    return verify(TaskGraph(rounds, tuple(builder.tasks), tuple(builder.edges), steady))


@dataclass(frozen=True)
class _Node:
    """A place in the tree of outcomes."""

    history: str
    guard: Guard
    writer: str | None
    """The task that wrote the step before."""


@dataclass
class _Builder:
    workflow: Workflow
    rounds: int
    steady: bool
    tasks: list[Task] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    @property
    def verifier(self) -> RoleName:
        """Who scores."""
        return VERIFIER.get(self.workflow.policy.kind, RoleName.PRM)

    @property
    def before(self) -> int:
        """Rounds of the problem before the window."""
        return int(max(0, self.workflow.statistics.steps - self.rounds) // 2) if self.steady else 0

    @property
    def accepted_before(self) -> int:
        """Steps that the target has not read when the window begins, on average: accepted since it last wrote."""
        accept = self.workflow.statistics.accept
        return round(sum(accept**n for n in range(1, self.before + 1)))

    def prefill(self) -> None:
        for role in NEEDED_ROLES[self.workflow.policy.kind]:
            prompt = self.workflow.statistics.prompt_tokens
            self.tasks.append(Task(f"prefill.{role}", Op.PREFILL, role, 0, tokens_in=prompt))

    def add(self, op: Op, name: str, node: _Node, guard: Guard, needs: list[str | None], **counts: float) -> str:
        """Append a task; `needs` are its producers, the prompt's prefill is added to them.

        `behind` are tokens of earlier steps that the role has not read yet.
        """
        role = {Op.DRAFT: RoleName.DRAFT, Op.VERIFY: self.verifier}.get(op, RoleName.TARGET)
        task = f"{name}.{node.history}" if node.history else name
        accept, behind = counts.pop("accept", None), counts.pop("behind", 0)
        tokens_in, tokens_out = int(counts.pop("tokens_in", 0) + behind), int(counts.pop("tokens_out", 0))
        self.tasks.append(
            Task(
                task,
                op,
                role,
                len(node.history),
                guard=guard,
                accept=accept,
                context=self.context(node) - int(behind),
                tokens_in=tokens_in,
                tokens_out=tokens_out,
            )
        )
        prompt = None if self.steady else f"prefill.{role}"
        for source in [prompt, *needs]:
            if source is not None and Edge(source, task) not in self.edges:
                self.edges.append(Edge(source, task))
        return task

    def context(self, node: _Node) -> int:
        s = self.workflow.statistics
        # How far back an alternative went is not known: its place counts as deep as that of a refined step.
        steps = {"A": s.draft_step_tokens, "R": s.target_step_tokens, "B": s.target_step_tokens}
        mean = s.accept * s.draft_step_tokens + (1 - s.accept) * s.target_step_tokens
        return s.prompt_tokens + int(self.before * mean) + sum(steps[outcome] for outcome in node.history)

    def round(self, node: _Node) -> None:
        """The tasks of one round and, below it, of the rounds that can follow."""
        over = len(node.history) == self.rounds
        if over and not self.steady:
            return
        stats, policy = self.workflow.statistics, self.workflow.policy
        kind = policy.kind
        scores_itself = self.verifier is RoleName.TARGET
        # A role that did not write the step before still has to read it; the first steps may all be the target's.
        refined = self.refined_tokens(node)
        accepted_since = len(node.history) - len(node.history.rstrip("A"))
        if accepted_since == len(node.history):
            accepted_since += self.accepted_before
        behind_target = 0 if scores_itself else min(stats.draft_step_tokens * accepted_since, self.context(node))
        behind_verifier = 0 if scores_itself else self.behind_verifier(node, refined)
        if kind is Policy.TARGET_ONLY or (kind in VERIFIER and len(node.history) < self.opening_steps):
            text = self.add(Op.REFINE, "refine", node, node.guard, [node.writer], tokens_out=stats.target_step_tokens)
            if not over:
                self.round(_Node(node.history + "R", node.guard, text))
            return
        draft = self.draft(node)
        if over:
            return
        if kind is Policy.DRAFT_ONLY:
            self.round(_Node(node.history + "A", node.guard, draft))
            return
        before = node.history.endswith("A") if node.history else None
        check = self.add(
            Op.VERIFY,
            "verify",
            node,
            node.guard,
            [draft],
            behind=behind_verifier,
            tokens_in=policy.drafts * (stats.draft_step_tokens + self.question_tokens),
            accept=policy.best(stats.accept_after(before)),
        )
        accepted = (*node.guard, Literal(check, Verdict.ACCEPT))
        rejected = (*node.guard, Literal(check, Verdict.REJECT))
        refine = self.add(
            Op.REFINE,
            "refine",
            node,
            rejected,
            [node.writer],
            behind=behind_target,
            tokens_out=stats.target_step_tokens,
        )
        kept = rejected
        if self.scored(node.history):
            kept = self.backtrack(node, rejected, refine)
        self.round(_Node(node.history + "A", accepted, draft))
        self.round(_Node(node.history + "R", kept, refine))

    @property
    def question_tokens(self) -> int:
        """Tokens of the score prompt, about: no tokenizer is asked here, and four characters a token are usual."""
        return -(-len(self.workflow.policy.score_prompt) // 4) if self.verifier is RoleName.TARGET else 0

    @property
    def opening_steps(self) -> int:
        """Steps at the window's beginning that are the target's; a steady window begins after them."""
        return 0 if self.steady else self.workflow.policy.first_target_steps

    def refined_tokens(self, node: _Node) -> int:
        """Tokens that the target wrote last: one step, or all of the first ones."""
        steps = max(1, self.opening_steps) if len(node.history) == self.opening_steps else 1
        return steps * self.workflow.statistics.target_step_tokens

    def draft(self, node: _Node) -> str:
        """Draft the step after a place, and read the target's step before it if there is one."""
        behind = self.refined_tokens(node) if node.history.endswith(("R", "B")) else 0
        tokens = self.workflow.policy.drafts * self.workflow.statistics.draft_step_tokens
        return self.add(Op.DRAFT, "draft", node, node.guard, [node.writer], behind=behind, tokens_out=tokens)

    def scored(self, history: str) -> bool:
        """Whether a refined step is scored: where a step before it could be replaced, a drafted one, or any if the
        target may write again at a place."""
        policy = self.workflow.policy
        open_place = "A" in history or (policy.resample_alternatives > 0 and history != "")
        return policy.kind is Policy.BACKTRACK and (open_place or self.before > 0)

    def behind_verifier(self, node: _Node, refined: int) -> int:
        """Tokens of the step before that the verifier has not read: of a refined one that was taken unscored."""
        if node.history:
            return refined if node.history.endswith("R") and not self.scored(node.history[:-1]) else 0
        unread = self.before > 0 and not self.scored("")
        return round(refined * (1 - self.workflow.statistics.accept)) if unread else 0

    def backtrack(self, node: _Node, rejected: Guard, refine: str) -> Guard:
        """Verify the refined step and, where that is weak, try an alternative; the guard under which it is not.

        Only an accepted step can be replaced by an alternative, so without one the refined step is not even scored.
        """
        stats = self.workflow.statistics
        again = self.add(
            Op.VERIFY,
            "reverify",
            node,
            rejected,
            [refine],
            tokens_in=stats.target_step_tokens,
            accept=stats.accept_refined,
        )
        weak = (*rejected, Literal(again, Verdict.REJECT))
        other = self.add(Op.BACKTRACK, "backtrack", node, weak, [refine], tokens_out=stats.target_step_tokens)
        # The verifier's cache goes back to the ancestor, and reads the alternative.
        check = self.add(Op.VERIFY, "recheck", node, weak, [other], tokens_in=stats.target_step_tokens)
        if self.steady:
            self.draft(_Node(node.history + "B", weak, check))
        return (*rejected, Literal(again, Verdict.ACCEPT))
