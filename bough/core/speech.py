"""Models that write down what they hear: what of one a server and an executor must know."""

import msgspec

SAMPLE_RATE = 16_000  # of the sound that models hear
HOP = 160  # samples from one frame of features to the next
# Tokens that stand so far before the first one for times; what they say of a text or begin it with.
TRANSLATE, TRANSCRIBE, SAID_BEFORE, NO_SPEECH, WITHOUT_TIMES = -6, -5, -3, -2, -1
TIME_SAMPLES = 2 * HOP  # from one of the times that tokens stand for to the next


class SpeechConfig(msgspec.Struct, frozen=True):
    """An encoder that hears a window of sound, and the tokens by which its decoder is told what to write."""

    encoder: dict[str, int]  # its sizes, by Transformers' names
    start: int  # <|startoftranscript|>
    end: int
    timestamps: int  # the first of the tokens for times, which are the last of the vocabulary
    suppress: tuple[int, ...] = ()  # what is never written
    begin_suppress: tuple[int, ...] = ()  # what a text does not begin with
    alignment: tuple[tuple[int, int], ...] = ()  # layers and heads of the decoder that look where a word is heard
    median_filter: int = 7  # positions, odd: over which what they see is smoothed

    @property
    def positions(self) -> int:
        """That the encoder gives, of two frames each."""
        return self.encoder["max_source_positions"]

    @property
    def english_only(self) -> bool:
        """Such a model has no tokens for languages and tasks, so those for times begin earlier."""
        return self.timestamps <= 50_363
