"""One request's grammar and bad words, and where the request stands in them.

Owns the matcher, the work of its masks, the bad words, and the track of the thinking before it. It says what may be
sampled next, steps over what was, and settles the questions that a grammar alone leaves open: it begins when the
thinking is over, which cannot end the request; stop tokens are kept away until `min_new_tokens` and, with `ignore_eos`,
as long as anything else may come; but a text that can only end does end, because nothing could follow. Where a
library's mask allows a token that the library itself then does not take, that token is forbidden there and another one
is sampled.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from bough.constrained.interface import Compiled
from bough.constrained.vocabulary import allow_also
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.core.plan import IntArray
from bough.core.sampling_params import SamplingParams
from bough.messages.requests import Thinking
from bough.scheduler.mask_work import MaskWork

DEAD_END = FinishAbort(
    "The grammar allows no token of this model's vocabulary here; other requests go on.",
    status_code=500,
    err_type="InternalServerError",
)
DEAD_END_OF_WORDS = FinishAbort(
    "The grammar and bad_words together allow no token here; leave one of them out.", field="bad_words"
)


class ThinkingTrack:
    """Where a request stands in its model's thinking: a grammar holds only for what comes after it, a budget ends it.

    Markers open and close it. It has begun when the prompt opened it; else the model may open it as the first thing it
    says. An answer may begin with the first tokens of a marker too: until they differ, both are possible.
    """

    def __init__(self, marks: Thinking) -> None:
        self._marks = marks
        self._opening: tuple[int, ...] = ()  # of a marker that the answer has begun with
        self._tail: tuple[int, ...] = ()  # the last tokens inside, as many as the end marker has
        self._spent = 0
        self._cut = 0  # tokens of the ending that the budget enforces, said so far
        self.inside = marks.begun
        self.over = False

    @property
    def undecided(self) -> bool:
        """What was said so far does not tell whether the model thinks."""
        return not self.over and not self.inside

    @property
    def openings(self) -> tuple[int, ...]:
        """While it is undecided: the tokens that go on with a marker, which begins the thinking or ends it unopened."""
        if not self.undecided:
            return ()
        said = len(self._opening)
        markers = (self._marks.start, self._marks.end)
        return tuple({m[said] for m in markers if len(m) > said and m[:said] == self._opening})

    @property
    def forced(self) -> int | None:
        """The one token that may come when the budget is used up."""
        if not self.inside or self._marks.budget is None or self._spent < self._marks.budget:
            return None
        return self._marks.cut[self._cut]

    def open(self, token: int) -> None:
        self._opening = (*self._opening, token)
        self.inside = self._opening == self._marks.start
        self.over = self._opening == self._marks.end

    def think(self, token: int) -> None:
        self._cut += self.forced is not None
        self._spent += 1
        self._tail = (*self._tail, token)[-len(self._marks.end) :]
        self.over = self._tail == self._marks.end or self._cut == len(self._marks.cut)
        self.inside = not self.over


class BadWords:
    """Words of several tokens that an answer must not say: where all but the last of one were just said, the last is
    forbidden. (Words of one token are a logit bias.) Owns the last tokens that its request has said: `say` each of
    them. A request without such words has one too."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}  # by the tokens before
        for *head, last in words:
            self._ends.setdefault(tuple(head), []).append(last)
        self._lengths = {len(head) for head in self._ends}
        self._said = deque[int](maxlen=max(self._lengths, default=0))

    def __bool__(self) -> bool:
        return bool(self._ends)

    def say(self, token: int) -> None:
        self._said.append(token)

    def forbidden(self) -> list[int]:
        """The tokens that would complete a word."""
        said = tuple(self._said)
        return [token for length in self._lengths for token in self._ends.get(said[-length:], ())]


class Constraint:
    """Lives as long as its request, through retractions too: it has stepped over exactly the tokens that are known."""

    def __init__(
        self,
        compiled: Compiled | None,
        sampling: SamplingParams,
        stop_ids: Iterable[int],
        eos_ids: Sequence[int],
        thinking: Thinking | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Without a grammar only the thinking is bounded, and bad words are kept away."""
        self._matcher = None if compiled is None else compiled.matcher()
        self._masks = None if compiled is None or self._matcher is None else MaskWork(self._matcher, compiled)
        self._thinking = None if thinking is None else ThinkingTrack(thinking)
        self._bad_words = BadWords(bad_words)
        self._tried = 0  # tokens of the grammar that may turn out to be a marker of thinking
        self._answers = thinking is None or not thinking.begun  # what was said so far may be the answer
        self._stepped = False  # the grammar has begun, and it is known that it has
        self._refused: list[int] = []  # tokens that the mask allows here and the matcher does not take
        self.warnings = () if compiled is None else compiled.warnings
        self._min_new = sampling.min_new_tokens
        self._eos_ids = tuple(eos_ids)
        self._ends = tuple({*stop_ids, *eos_ids})
        self._ignored = self._eos_ids if sampling.ignore_eos and compiled is not None else ()
        self.late = False  # when it was last asked, the mask was not worked out yet
        self.dead_end: FinishAbort | None = None  # why nothing was allowed when it was last asked

    def allow(self, words: IntArray, generated: int, deadline: float | None = None) -> None:
        """Writes what may be sampled as output token number `generated`, counted from 0. If it is `late` by the
        deadline, that is anything, and what is sampled must be dropped."""
        self.dead_end, self.late = None, False
        self._allow(words, generated, deadline)
        if self.late:
            return
        _clear(words, self._bad_words.forbidden())
        if not words.any():
            self.dead_end = self.dead_end or (DEAD_END_OF_WORDS if self._bad_words else DEAD_END)

    def allow_behind(self, drafts: Sequence[int], parents: Sequence[int], lines: IntArray, generated: int) -> None:
        """Writes what may be sampled behind each of some drafts; `parents` as in `BatchPlan`. Where that is not quickly
        said, or nothing could be, it is anything: should the drafts hold, what the grammar does not take of what is
        sampled behind them is taken back, and looked at anew."""
        if self.late or not self.quick or self._refused:
            return
        if self._matcher is None:  # behind thinking that is over: anything, but no end that would come too early
            depths = [0]
            for parent, line in zip(parents, lines, strict=True):
                depths.append(depths[parent] + 1)
                self._allow(line, generated + depths[-1] - 1)
            return
        paths: dict[int, list[int]] = {0: []}  # of drafts that the grammar takes: those before, and itself
        at, why_dead = paths[0], self.dead_end
        for node, (draft, parent, line) in enumerate(zip(drafts, parents, lines, strict=True), 1):
            if not self.quick or (path := paths.get(parent)) is None:
                continue
            same = sum(a == b for a, b in zip(at, path, strict=False))  # once apart, they stay so
            self._matcher.rollback(len(at) - same)
            at = path
            for before in path[same:]:
                self._matcher.accept(drafts[before - 1])
            if self._matcher.finished or not self._matcher.accept(draft):
                continue
            paths[node] = at = [*path, node]
            if not self._matcher.finished:
                self._allow(line, generated + len(at) - 1)
                if self.late or not line.any():
                    line.fill(-1)
                    break
        self._matcher.rollback(len(at))
        self.late, self.dead_end = False, why_dead

    def _allow(self, words: IntArray, generated: int, deadline: float | None = None) -> None:
        if self._masks is None:
            words.fill(-1)
        elif self._answers:
            self._fill(self._masks, words, deadline)
            if self.late:
                return
        else:
            words.fill(0)
        if self._thinking is not None and not self._thinking.over:
            _think(words, self._thinking)
        thinks = self._masks is not None and not self._answers
        held_back = self._ends if generated < self._min_new or thinks else self._ignored
        if held_back:
            others = words.copy()
            _clear(others, held_back)
            if others.any():
                words[:] = others

    @property
    def awaits_mask(self) -> bool:
        """A mask that was late is still not there."""
        return self._masks is not None and self._masks.busy

    def _fill(self, masks: MaskWork, words: IntArray, deadline: float | None = None) -> None:
        """A back end may meet a limit of its own on the way; that concerns this request alone."""
        try:
            self.late = not masks.fill(words, deadline)
        except RequestError as error:
            words.fill(0)
            self.dead_end = FinishAbort.because(error)
        if self.late:
            words.fill(-1)
        elif self._refused:
            _clear(words, self._refused)

    def accept(self, token: int) -> bool:
        """Steps over a sampled token; False, and it stands where it stood, when the grammar does not take it, or it
        completes a bad word: the token is not allowed here any more."""
        taken = token not in self._bad_words.forbidden() and self._accept(token)
        if taken:
            self._bad_words.say(token)
        self._refused = [] if taken else [*self._refused, token]
        return taken

    def _accept(self, token: int) -> bool:
        track = self._thinking
        if track is not None and track.undecided:
            return self._accept_undecided(track, token)
        if track is not None and track.inside:
            track.think(token)
            self._answers = track.over
            return True
        if self._masks is None:
            return True
        taken = self._masks.accept(token)
        self._stepped |= taken
        return taken

    def _accept_undecided(self, track: ThinkingTrack, token: int) -> bool:
        """A token that may be part of a marker, of the answer, or of both, as far as one can tell."""
        opens = token in track.openings
        answers = self._answers and (self._matcher is None or self._matcher.accept(token))
        if not opens:
            if answers:
                track.over = True  # what was said is the answer: there is no thinking
                self._stepped = self._matcher is not None
            return answers
        self._tried += answers
        track.open(token)
        if not answers or not track.undecided:
            if self._matcher is not None:
                self._matcher.rollback(self._tried)
            self._tried = 0
            self._answers = track.over
        return True

    @property
    def quick(self) -> bool:
        """The grammar is under way, and asking it something costs nothing worth mentioning; or there is none, and the
        thinking is over. It alone does not know what must come where there are bad words. Only then can it be told what
        may come behind drafts."""
        if self._bad_words or self._masks is None:
            return not self._bad_words and self._thinking is not None and self._thinking.over
        return self._stepped and not self._masks.slow

    def forced(self) -> bytes:
        """What must come next behind a token of the grammar, whatever is sampled."""
        if self._matcher is None or not self.quick or self._matcher.finished:
            return b""
        return self._matcher.forced()

    def forced_first(self) -> bytes:
        """What an answer must begin with; nothing where thinking may come before, or bad words forbid it."""
        return b"" if self._matcher is None or self._thinking is not None or self._bad_words else self._matcher.forced()

    def must_end(self, scratch: IntArray) -> bool:
        """Whether the text is whole and nothing may follow but its end."""
        if self._matcher is None or not self.quick or self._matcher.finished or not self._matcher.can_end:
            return False
        assert self._masks is not None
        self._fill(self._masks, scratch)
        _clear(scratch, self._eos_ids)
        return self.dead_end is None and not scratch.any()

    def extend(self, tokens: Sequence[int]) -> bool:
        """Steps over tokens that were not sampled. False, and nothing has changed, when the grammar refuses one."""
        assert self._matcher is not None
        for count, token in enumerate(tokens):
            if not self._matcher.accept(token):
                self._matcher.rollback(count)
                return False
        self._stepped = True
        return True

    def replace(self, last: int, tokens: Sequence[int]) -> bool:
        """Takes the last token back and steps over `tokens` in its place. False, and nothing has changed, when the
        grammar refuses one of them."""
        assert self._matcher is not None
        self._matcher.rollback(1)
        if self.extend(tokens):
            return True
        self._matcher.accept(last)
        return False

    def finish(self, last: int, tokens: Sequence[int], scratch: IntArray) -> bool:
        """`replace`, if then nothing may follow but the end. False, and nothing has changed, elsewhere."""
        if not self.replace(last, tokens):
            return False
        if self.must_end(scratch):
            return True
        assert self._matcher is not None
        self._matcher.rollback(len(tokens))
        self._matcher.accept(last)
        return False


def _think(words: IntArray, track: ThinkingTrack) -> None:
    """Allows what the thinking asks for: anything inside of it while the budget lasts; before it, what begins it."""
    only = track.openings if track.forced is None else (track.forced,)
    if track.inside:
        words.fill(0 if only else -1)
    allow_also(only, words)


def _clear(words: IntArray, tokens: Sequence[int]) -> None:
    """Forbids these tokens; there are a handful of them."""
    bits = words.view(np.uint32)
    for token in tokens:
        if token < 32 * len(words):
            bits[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
