"""What rows hear, and the rules by which they write it down.

Owns each row's keys and values of its recording, computed when the row is set up, and the tokens that it has written:
which token may come next depends on those before, and on how likely a time is beside all words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext, Heard
from bough.core.media import MediaItem
from bough.core.plan import BatchPlan, FloatArray, IntArray, RowSetup
from bough.core.speech import WITHOUT_TIMES, SpeechConfig
from bough.executor.layout import StepLayout
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
        self._written, self._timed = dict[int, list[int]](), dict[int, bool]()
        self._aligning: dict[int, tuple[RowSetup, list[torch.Tensor]]] = {}  # by row, what came of each chunk
        self._threads = torch.get_num_threads()
        # The products of a small decoder's step are over before a second thread has woken up.
        self._step_threads = 1 if model.config.hidden_size <= SMALL else self._threads

    def begin(self, plan: BatchPlan, ctx: ForwardContext) -> ForwardContext:
        """Sets up rows, and tells what each of the batch has heard, and which align."""
        for setup in plan.setups:
            assert setup.audio is not None and setup.history is not None
            self._heard[setup.row] = self._hear(setup.audio, ctx)
            self._written[setup.row] = setup.history[setup.prompt_len :].tolist()
            self._timed[setup.row] = int(setup.history[setup.prompt_len - 1]) != self._speech.timestamps + WITHOUT_TIMES
            self._aligning.pop(setup.row, None)
            if setup.pooling is not None:
                self._aligning[setup.row] = setup, []
        rows = plan.rows.tolist()
        heard = tuple(self._heard[row][1] for row in rows)
        return replace(ctx, heard=heard, aligned={i: [] for i, row in enumerate(rows) if row in self._aligning})

    def align(
        self, plan: BatchPlan, layout: StepLayout, found: Mapping[int, list[torch.Tensor]]
    ) -> dict[int, FloatArray]:
        """Of the prompts that end with this step, where the decoder looks while it reads each of the tokens."""
        ended: dict[int, FloatArray] = {}
        for place, weights in found.items():
            setup, chunks = self._aligning[row := int(plan.rows[place])]
            chunks.append(torch.cat(weights))
            if layout.lengths[place] == setup.prompt_len:
                assert setup.pooling is not None
                seen = torch.cat(chunks, 1)[:, setup.pooling.second :, : setup.pooling.dimensions]
                ended[place] = smooth(seen.float(), self._speech.median_filter).cpu().numpy()
                del self._aligning[row]
        return ended

    def _hear(self, audio: MediaItem, ctx: ForwardContext) -> tuple[bytes, Heard]:
        for digest, known in self._heard.values():
            if digest == audio.digest:
                return digest, known
        (feature,), digest = audio.features, audio.digest
        try:
            sound = np.fromfile(audio.file, feature.dtype).reshape(feature.shape)
        except FileNotFoundError:  # its client has left: nobody reads what the row writes
            sound, digest = np.zeros(feature.shape, feature.dtype), b""
        # oneDNN multiplies large matrices fastest, and takes long to begin with small ones.
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
        torch.set_num_threads(self._threads)
        heard = self._model.hear(torch.from_numpy(sound), ctx)
        torch.set_num_threads(self._step_threads)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        return digest, heard

    def ruled(self, draw: Draw) -> Draw:
        """The same for logits that keep the rules; those given stay as they are, for logprobs."""

        def draw_ruled(logits: torch.Tensor, rows: IntArray, masks: BatchMasks | None) -> Drawn:
            lines = logits[: len(rows)].clone()
            for line, row in zip(lines, rows.tolist(), strict=True):
                keep_rules(line, self._speech, self._written[row], timed=self._timed[row])
            drawn = draw(lines, rows, masks)
            for row, token in zip(rows.tolist(), drawn.tokens.tolist(), strict=True):
                self._written[row].append(token)
            return drawn

        return draw_ruled


def smooth(weights: torch.Tensor, width: int) -> torch.Tensor:
    """[tokens, positions] of what heads attend to [heads, tokens, positions]: each head's weights beside those of other
    tokens, their medians over `width` positions, and the mean of the heads."""
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    weights = ((weights - mean) / deviation).nan_to_num()  # a single token differs from none
    if weights.shape[2] > width // 2:
        padded = F.pad(weights, (width // 2, width // 2), mode="reflect")
        weights = padded.unfold(2, width, 1).median(-1).values
    return weights.mean(0)


def keep_rules(logits: torch.Tensor, speech: SpeechConfig, written: Sequence[int], *, timed: bool) -> None:
    """Forbids in `logits` [vocab_size] what may not follow what is `written`. With times, a text begins with one, they
    come in pairs of an end and a beginning, and never go back."""
    first, begins = speech.timestamps, not written
    was_time = not begins and written[-1] >= first
    ended = was_time and len(written) > 1 and written[-2] < first
    logits[[*speech.suppress, *(speech.begin_suppress if begins else ()), first + WITHOUT_TIMES]] = NEVER
    if not timed or (was_time and not ended):
        logits[first:] = NEVER  # words alone, or a text that has begun
    elif begins:
        logits[:first] = NEVER
        logits[first + FIRST_TIME + 1 :] = NEVER
    elif ended:
        logits[: speech.end] = NEVER  # the next text begins, or all is said
    times = [token for token in written if token >= first]
    if times:
        logits[first : times[-1] + (not ended)] = NEVER  # only what begins may do so when the last one ended
    if timed and logits[first:].logsumexp(0) > logits[:first].max():
        logits[:first] = NEVER
