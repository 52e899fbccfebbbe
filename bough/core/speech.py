"""Models that write down what they hear: what of one a server and an executor must know."""

from __future__ import annotations

import msgspec

SAMPLE_RATE = 16_000  # of the sound that models hear
HOP = 160  # samples from one frame of features to the next


class SpeechConfig(msgspec.Struct, frozen=True):
    """An encoder that hears a window of sound, and the tokens by which its decoder is told what to write."""

    layers: int  # of the encoder
    heads: int
    inner: int  # width of its MLPs
    mel_bins: int
    positions: int  # that the encoder gives; each stands for two frames
    start: int  # <|startoftranscript|>
    end: int
    timestamps: (
        int  # the first of the tokens for times, which are the last of the vocabulary; <|notimestamps|> is before
    )
    suppress: tuple[int, ...] = ()  # what is never written
    begin_suppress: tuple[int, ...] = ()  # what a text does not begin with

    @property
    def frames(self) -> int:
        return 2 * self.positions

    @property
    def samples(self) -> int:
        """Of a window."""
        return self.frames * HOP

    @property
    def without_times(self) -> int:
        return self.timestamps - 1

    @property
    def token_samples(self) -> int:
        """From the time of one token to that of the next."""
        return 2 * HOP

    @property
    def english_only(self) -> bool:
        """Such a model has no tokens for languages and tasks, so those for times begin earlier."""
        return self.timestamps <= 50_363
