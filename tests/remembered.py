"""Real models whose answers are worked out once: a token, or a score, is a function of what was read before it.

The engine does all its work on them: what each cache holds, chunk by chunk, decides what is looked up. So a suite that
runs the same problems by hundreds of plans finds every mistake of the engine, in minutes. What it cannot find is a
mistake inside a model's own cache; the suites that run the models themselves are for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random

from planner.errors import UserError
from planner.runtime.backend import Backend, Handed, ModelInfo, Output, Work, one_by_one
from planner.runtime.faults import DeviceFault, Fault, FaultKind
from planner.workflow import Role

Token = tuple[int, bool, bool]
"""Its id, and whether it ends the step, and the text."""


@dataclass
class Memory:
    """What one kind of backend has worked out so far. Texts read are nodes of a tree; node 0 is the empty one."""

    real: Backend
    asked: int = 0
    """Chunks that the real models did."""
    _next: dict[tuple[int, int], int] = field(default_factory=dict)
    _path: dict[int, tuple[int, int]] = field(default_factory=dict)
    _tokens: dict[tuple[object, ...], Token] = field(default_factory=dict)
    _scores: dict[tuple[object, ...], float] = field(default_factory=dict)
    _held: dict[str, list[int]] = field(default_factory=dict)
    """What the real cache of each role holds."""

    def __post_init__(self) -> None:
        self.load, self.encode = cache(self.real.load), cache(self.real.encode)
        self.encode_prompt, self.decode = cache(self.real.encode_prompt), cache(self.real.decode)

    def node(self, after: int, token: int) -> int:
        """The text `after` with one more token."""
        found = self._next.setdefault((after, token), len(self._next) + 1)
        self._path.setdefault(found, (after, token))
        return found

    def last(self, node: int) -> int:
        """The last token of a text."""
        return self._path[node][1]

    def token(self, work: Work, node: int, left: int) -> Token:
        """What is written after a text; the real model goes on for up to `left` tokens if that is not known."""
        how = (work.role, work.key, work.temperature, work.top_k, work.top_p, work.min_p)
        if (*how, node) not in self._tokens:
            output = self._ask(node, replace(work, max_new=left))
            at = node
            for number, token in enumerate(output.tokens, 1):
                last = number == len(output.tokens)
                self._tokens[*how, at] = (token, last and output.complete, last and output.ended)
                at = self.node(at, token)
            self._held[work.role] += output.tokens
        return self._tokens[*how, node]

    def scores(self, work: Work, nodes: Sequence[int]) -> tuple[float, ...]:
        """The score of each position that is asked for; one real pass works out those that are not known."""
        keys = [(work.role, work.ask, work.expectation, nodes[at]) for at in work.score]
        if any(key not in self._scores for key in keys):
            self._scores.update(zip(keys, self._ask(nodes[-1], work).scores, strict=True))
        return tuple(self._scores[key] for key in keys)

    def _ask(self, node: int, work: Work) -> Output:
        """Have the real model read a text and do what the work asks for after it."""
        self.asked += 1
        text: list[int] = []
        while node:
            node, token = self._path[node]
            text.append(token)
        text.reverse()
        held = self._held.get(work.role, [])
        keep = next((n for n, (a, b) in enumerate(zip(held, text, strict=False)) if a != b), min(len(held), len(text)))
        self._held[work.role] = text
        return self.real.run(replace(work, sequence="remembered", keep=keep, feed=tuple(text[keep:])))


class Remembered:
    """One device with its own caches."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: dict[tuple[str, str], list[int]] = {}
        """The nodes of the texts that each sequence has gone through."""

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        return self._memory.load(name, role, delimiter)

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        return self._memory.encode(name, text)

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        return self._memory.encode_prompt(name, text)

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        return self._memory.decode(name, tuple(tokens))

    def run(self, work: Work) -> Output:
        if work.beside:
            return one_by_one(work, self.run, partial(self.fork, work.role), partial(self.rewind, work.role))
        held = self._held.setdefault((work.role, work.sequence), [])
        if work.keep > len(held):
            raise ValueError(f"{work.role} holds {len(held)} tokens, not {work.keep}")
        del held[work.keep :]
        for token in work.feed:
            held.append(self._memory.node(held[-1] if held else 0, token))
        if work.score:
            return Output(scores=self._memory.scores(work, held))
        written: list[int] = []
        complete = ended = False
        while len(written) < work.max_new and not (complete or ended):
            here = replace(work, begun=(*work.begun, *written))
            token, complete, ended = self._memory.token(here, held[-1], work.max_new - len(written))
            written.append(token)
            held.append(self._memory.node(held[-1], token))
        return Output(tuple(written), complete, ended)

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        del self._held[name, sequence][tokens:]

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        self._held[name, new_sequence] = list(self._held[name, sequence])

    def hand_over(self, name: str, sequence: str) -> Handed:
        """The tokens: keys and values stay with the real model."""
        held = self._held[name, sequence]
        return Handed(tuple(self._memory.last(node) for node in held), b"")

    def take_over(self, name: str, sequence: str, handed: Handed) -> None:
        self._held[name, sequence] = held = []
        for token in handed.tokens:
            held.append(self._memory.node(held[-1] if held else 0, token))

    def close(self) -> None:
        self._held.clear()


def _raises(error: Exception) -> Callable[[Output], Output]:
    def wrong(output: Output) -> Output:
        raise error

    return wrong


PASSING: tuple[Callable[[Output], Output], ...] = (
    _raises(ZeroDivisionError("oh")),
    _raises(UserError("the fan stopped", mend="clean it")),
    _raises(RuntimeError("RESOURCE_EXHAUSTED: out of memory while allocating")),
    lambda o: Output() if o.tokens or o.scores else Output((1,)),
    lambda o: replace(o, tokens=(*o.tokens, *(0,) * 300)),
    lambda o: replace(o, scores=(float("nan"),) * max(1, len(o.scores))),
    lambda o: replace(o, scores=(*o.scores, 0.5)),
)
"""Faults after which the device works again."""
LAST = (
    Fault(FaultKind.DIED, "its process ended with exit code -9"),
    Fault(FaultKind.HUNG, "a chunk was not over after 60 s"),
)


class Unreliable(Remembered):
    """Fails in every way now and then, never twice in a row; what it leaves in its caches then is anything."""

    def __init__(self, memory: Memory, random: Random, may_end: Callable[[], bool], rate: float = 0.02) -> None:
        """`may_end` tells whether the device may be lost for good, which it is then."""
        super().__init__(memory)
        self._random, self._may_end, self._rate = random, may_end, rate
        self._calm = False

    def run(self, work: Work) -> Output:
        output = super().run(work)
        if self._calm or self._random.random() > self._rate:
            self._calm = False
            return output
        self._calm = True
        self._held[work.role, work.sequence] += [0, 1, 0]
        if self._random.random() < 0.2 and self._may_end():
            raise DeviceFault(self._random.choice(LAST))
        return self._random.choice(PASSING)(output)
