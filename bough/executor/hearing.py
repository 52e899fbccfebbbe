"""What rows hear, and the rules by which they write it down.

Owns each row's keys and values of its recording, computed when the row is set up, and the tokens that it has written:
which token may come next depends on those before, and on how likely a time is beside all words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bough.attention.context import ForwardContext, Heard
from bough.core.media import MediaItem
from bough.core.plan import IntArray, RowSetup, StepResult
from bough.core.speech import SpeechConfig
from bough.executor.verification import Draw, Drawn
from bough.models.whisper_model import WhisperModel
from bough.sampling.masks import BatchMasks

FIRST_TIME = 50  # no text begins later than this many time tokens, a second, after its window
SMALL = 512  # hidden size
NEVER = float("-inf")


class Hearing:
    def __init__(self, model: WhisperModel) -> None:
        assert model.config.speech is not None
        self._model, self._speech = model, model.config.speech
        self._heard: dict[int, tuple[bytes, Heard]] = {}  # by row, with the recording's digest
        self._written: dict[int, list[int]] = {}
        self._timed: dict[int, bool] = {}
        self._threads = torch.get_num_threads()
        # The products of a small decoder's step are over before a second thread has woken up.
        self._step_threads = 1 if model.config.hidden_size <= SMALL else self._threads

    def set_up(self, setups: Sequence[RowSetup], ctx: ForwardContext) -> None:
        for setup in setups:
            assert setup.audio is not None and setup.history is not None
            digest = setup.audio.digest
            known = next((heard for other, heard in self._heard.values() if other == digest), None)
            heard = self._hear(setup.audio, ctx) if known is None else known
            self._heard[setup.row] = digest, heard
            self._written[setup.row] = setup.history[setup.prompt_len :].tolist()
            self._timed[setup.row] = int(setup.history[setup.prompt_len - 1]) != self._speech.without_times

    def _hear(self, audio: MediaItem, ctx: ForwardContext) -> Heard:
        share_work(self._threads, onednn=True)
        heard = self._model.hear(read_features(audio), ctx)
        share_work(self._step_threads, onednn=False)
        return heard

    def heard_by(self, rows: IntArray) -> tuple[Heard, ...]:
        return tuple(self._heard[row][1] for row in rows.tolist())

    def ruled(self, draw: Draw) -> Draw:
        """The same for logits that keep the rules; those given stay as they are, for logprobs."""

        def draw_ruled(logits: torch.Tensor, rows: IntArray, masks: BatchMasks | None) -> Drawn:
            lines = logits[: len(rows)].clone()
            for line, row in zip(lines, rows.tolist(), strict=True):
                keep_rules(line, self._speech, self._written[row], timed=self._timed[row])
            return draw(lines, rows, masks)

        return draw_ruled

    def follow(self, rows: IntArray, result: StepResult) -> None:
        """These rows have got the step's tokens."""
        for row, tokens, count in zip(rows.tolist(), result.tokens.tolist(), result.counts.tolist(), strict=True):
            self._written[row] += tokens[:count]


def share_work(threads: int, *, onednn: bool) -> None:
    """oneDNN multiplies large matrices fastest, and takes long to begin with small ones."""
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]


def read_features(item: MediaItem) -> torch.Tensor:
    (feature,) = item.features
    count = int(np.prod(feature.shape))
    found = np.fromfile(item.file, dtype=feature.dtype, count=count, offset=feature.offset)
    return torch.from_numpy(found.reshape(feature.shape))


def keep_rules(logits: torch.Tensor, speech: SpeechConfig, written: Sequence[int], *, timed: bool) -> None:
    """Forbids in `logits` [vocab_size] what may not follow what is `written`. With times, a text begins with one, they
    come in pairs of an end and a beginning, and never go back."""
    first = speech.timestamps
    logits[list(speech.suppress)] = NEVER
    if not written:
        logits[list(speech.begin_suppress)] = NEVER
    if not timed:
        logits[speech.without_times :] = NEVER
        return
    logits[speech.without_times] = NEVER
    if not written:
        logits[:first] = NEVER
        logits[first + FIRST_TIME + 1 :] = NEVER
        return
    was_time = written[-1] >= first
    if was_time and (len(written) < 2 or written[-2] >= first):
        logits[first:] = NEVER  # a text has begun
    elif was_time:
        logits[: speech.end] = NEVER  # one has ended: the next begins, or all is said
    times = [token for token in written if token >= first]
    if times:
        opens = was_time and len(written) > 1 and written[-2] < first
        logits[first : times[-1] + (not opens)] = NEVER  # only what begins may do so when the last one ended
    scores = logits.log_softmax(0)
    if scores[first:].logsumexp(0) > scores[:first].max():
        logits[:first] = NEVER
