"""What a device must be able to do: the protocol that every backend fulfils, and the work it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from planner.workflow import Role


@dataclass(frozen=True)
class ModelInfo:
    """What the engine needs to know of a loaded model."""

    model_hash: str
    """Hash of the checkpoint's files: costs are looked up by it."""
    tokenizer_hash: str
    """Roles with equal hashes exchange token ids, others text."""
    weight_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    """Most tokens a sequence may hold."""
    batches: bool = False
    """Whether it writes several drafts of a step in one pass, each as it would be written alone: see `Work.beside`."""


@dataclass(frozen=True)
class Handed:
    """What a cache holds, on its way to another device of the same numerics class."""

    tokens: tuple[int, ...]
    rows: bytes
    """Keys and values of these tokens, (layers, 2, tokens, key heads, head_dim) in the arithmetic of the class, the
    low byte first: `kv_bytes_per_token` for each token."""


@dataclass(frozen=True)
class Sibling:
    """Another draft of the step that a chunk writes."""

    key: int
    """See `Work.key`."""
    begun: tuple[int, ...]
    """Its tokens so far."""
    max_new: int


@dataclass(frozen=True)
class Work:
    """One chunk of work on one sequence of one role. What it returns depends on its fields alone.

    A sequence is a named cache of a role. First it is rewound to its first `keep` tokens, then `feed` is
    appended, then up to `max_new` tokens are generated. Nothing is generated past a delimiter or the end of text.
    What `perform` does before and after is told by the last fields.
    """

    role: str
    sequence: str
    keep: int
    """Tokens of the sequence that stay. More than it holds is an error: a cache is never longer than believed."""
    feed: tuple[int, ...]
    max_new: int = 0
    """0: only read (PREFILL, VERIFY, SYNC)."""
    score: tuple[int, ...] = ()
    """Positions in the sequence whose score is asked for: the last token of each step."""
    ask: tuple[int, ...] = ()
    """The score prompt, for a role that judges by its next token after it: one digit. It leaves nothing behind."""
    expectation: bool = True
    """Whether that digit is the mean one, or the likeliest."""
    key: int = 0
    """64-bit key of the step for sampling; the backend folds in the token's position."""
    temperature: float = 0.0
    top_k: int = 0
    """Sample from so many of the likeliest tokens; 0: from all. For float models, as are the next two."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this share together."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability."""
    begun: tuple[int, ...] = ()
    """The last tokens, `feed` included, that belong to the step that is being written. A delimiter may have begun in
    them."""
    step_tokens: int = 0
    """At so many tokens a step that does not end by itself is over. The text of a step that is over is put out; 0:
    no text is asked for."""
    copy_of: str = ""
    """The sequence is first made a copy of this one."""
    handed: Handed | None = None
    """Or it is first made what another device has read."""
    hand_over: bool = False
    """Afterwards what it holds is put out, for another device."""
    beside: tuple[Sibling, ...] = ()
    """Further drafts of the step, which follow what the sequence holds before `begun`. They leave nothing behind: the
    next chunk says again how they begin. Only for a role whose model `batches`."""
    label: str = ""
    """Names the work in profiles."""

    @property
    def tokens_in(self) -> int:
        """Tokens that are read, those that the drafts beside begin with too."""
        return len(self.feed) + sum(len(sibling.begun) for sibling in self.beside)

    @property
    def most_tokens(self) -> int:
        """How many tokens may be written, in all drafts."""
        return self.max_new + sum(sibling.max_new for sibling in self.beside)


@dataclass(frozen=True)
class Output:
    """What a chunk gave."""

    tokens: tuple[int, ...] = ()
    """Generated tokens, the delimiter included."""
    complete: bool = False
    """The last token ended the step: it completed the delimiter or ended the text."""
    ended: bool = False
    """The last token ended the whole text."""
    scores: tuple[float, ...] = ()
    """Probability of "right so far" at each position asked for."""
    cycles: int = field(default=0, compare=False)
    """Clock cycles that a simulated device would have taken; 0 where nothing is simulated. Nothing decides by it."""
    handed: Handed | None = None
    """What the sequence holds, where that was asked for."""
    text: str | None = None
    """The step's, delimiter included, if it is over and its text was asked for."""
    beside: tuple[Output, ...] = ()
    """What each of the drafts beside it gave."""

    @property
    def tokens_out(self) -> int:
        """Tokens that were written, in all drafts."""
        return len(self.tokens) + sum(len(other.tokens) for other in self.beside)


class Backend(Protocol):
    """One device. Called from one thread; raises UserError for what the user can mend."""

    def load(self, name: str, role: Role, delimiter: str) -> ModelInfo:
        """Load the model of role `name`, compile what it will need. Steps end at `delimiter`."""
        ...

    def encode(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of `text`, as it stands after a prompt. Raises UserError if it cannot be written in tokens.

        A step is given with its delimiter; the last token is where a reward model scores it.
        """
        ...

    def encode_prompt(self, name: str, text: str) -> tuple[int, ...]:
        """Token ids of the prompt `text`, with what the model has around one, such as a chat template."""
        ...

    def decode(self, name: str, tokens: Sequence[int]) -> str:
        """Text of `tokens`, the end-of-text token left out."""
        ...

    def run(self, work: Work) -> Output:
        """Do one chunk. A sequence that is not known begins empty."""
        ...

    def rewind(self, name: str, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the sequence of role `name`."""
        ...

    def fork(self, name: str, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` of role `name` a copy of a known sequence, in place of what it was."""
        ...

    def hand_over(self, name: str, sequence: str) -> Handed:
        """What a known sequence of role `name`, which writes, holds. It stays as it is."""
        ...

    def take_over(self, name: str, sequence: str, handed: Handed) -> None:
        """Make the sequence of role `name`, which writes, what another device of its class has handed over.

        Raises ValueError if the rows are not as many bytes as the tokens need.
        """
        ...

    def unload(self, name: str) -> None:
        """Free the model of role `name` and its sequences; a role that is not loaded is no error."""
        ...

    def close(self) -> None:
        """Free what is held; calling it twice is harmless."""
        ...


def perform(backend: Backend, work: Work) -> Output:
    """Do a chunk, with what comes before and after it: a copy, a cache handed over or to be handed over, the text."""
    if work.copy_of:
        backend.fork(work.role, work.copy_of, work.sequence)
    if work.handed is not None:
        backend.take_over(work.role, work.sequence, work.handed)
    output = backend.run(work)
    if work.hand_over:
        output = replace(output, handed=backend.hand_over(work.role, work.sequence))
    if not work.step_tokens:
        return output
    beside = zip(work.beside, output.beside, strict=False)
    return replace(
        _with_text(backend, work, work.begun, output),
        beside=tuple(_with_text(backend, work, sibling.begun, other) for sibling, other in beside),
    )


def _with_text(backend: Backend, work: Work, begun: tuple[int, ...], output: Output) -> Output:
    """The output with the text of its step, if that is over."""
    step = (*begun, *output.tokens)
    if not (output.complete or output.ended or len(step) >= work.step_tokens):
        return output
    return replace(output, text=backend.decode(work.role, step))


def one_by_one(
    work: Work,
    run: Callable[[Work], Output],
    fork: Callable[[str, str], None],
    rewind: Callable[[str, int], None],
) -> Output:
    """A chunk with drafts beside it where no pass writes them together; the functions are those of the role."""
    output = run(replace(work, beside=()))
    before, copy = work.keep + len(work.feed) - len(work.begun), f"{work.sequence}.beside"
    found = []
    for sibling in work.beside:
        fork(work.sequence, copy)
        own = replace(work, sequence=copy, keep=before, feed=sibling.begun, begun=sibling.begun, beside=())
        found.append(run(replace(own, key=sibling.key, max_new=sibling.max_new)))
        rewind(copy, 0)
    return replace(output, beside=tuple(found))
