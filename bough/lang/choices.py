"""How `select` decides: methods that turn the logprobs of the choices' tokens into one choice.

A method is called with what a back end has scored; what it hands back besides its decision ends up in the variable's
meta information. Users may write their own by subclassing `ChoicesSamplingMethod`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Scored = Sequence[Any]  # (logprob, token id, text) for each token of a choice


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesSamplingMethod(ABC):
    """One way to decide. Lists run over the choices; entries of a token are (logprob, id, text)."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the choices must be scored without the text before them, too."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Scored],
        output_token_logprobs: Sequence[Scored],
        unconditional_token_logprobs: Sequence[Scored] | None = None,
    ) -> ChoicesDecision: ...


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The highest mean logprob of the tokens: long choices are not punished for their length."""

    def __call__(self, *, choices: Sequence[str], **scores: Any) -> ChoicesDecision:
        return ChoicesDecision(choices[int(np.argmax(scores["normalized_prompt_logprobs"]))], _evidence(scores))


class GreedyTokenSelection(ChoicesSamplingMethod):
    """What greedy decoding would have taken: the likeliest first token, among equals the likeliest second, and so on.
    A choice that has ended is represented by its mean, so that "Ja" and "Ja, sehr" can be compared."""

    def __call__(self, *, choices: Sequence[str], **scores: Any) -> ChoicesDecision:
        scored = scores["input_token_logprobs"]
        longest = max(map(len, scored))
        table = np.full((len(choices), longest), -np.inf)
        for row, tokens in zip(table, scored, strict=True):
            logprobs = [entry[0] for entry in tokens]
            row[:] = np.mean(logprobs)
            row[: len(logprobs)] = logprobs
        left = np.arange(len(choices))
        for column in range(longest):
            values = table[left, column]
            left = left[values == values.max()]
            if len(left) == 1:
                break
        seen = {**_evidence(scores), "greedy_logprob_matrix": table.tolist()}
        return ChoicesDecision(choices[int(left[0])], seen)


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """How much likelier the text before makes a choice: words that are common anyway have no advantage."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def __call__(self, *, choices: Sequence[str], **scores: Any) -> ChoicesDecision:
        unconditional = scores.get("unconditional_token_logprobs")
        if unconditional is None:
            raise ValueError("unconditional_likelihood_normalized needs unconditional_token_logprobs")
        gains = [
            # The first token of a text alone has no logprob: nothing stands before it.
            float(np.mean([with_text[0] - (alone[0] or 0.0) for with_text, alone in zip(given, bare, strict=True)]))
            for given, bare in zip(scores["input_token_logprobs"], unconditional, strict=True)
        ]
        seen = {
            **_evidence(scores),
            "unconditional_token_logprobs": list(unconditional),
            "normalized_unconditional_prompt_logprobs": gains,
        }
        return ChoicesDecision(choices[int(np.argmax(gains))], seen)


def _evidence(scores: dict[str, Any]) -> dict[str, Any]:
    names = ("normalized_prompt_logprobs", "input_token_logprobs", "output_token_logprobs")
    return {name: list(scores[name]) for name in names}


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


@dataclass(frozen=True, slots=True)
class Scores:
    """The tokens of each choice with their logprobs, after the text and, where asked for, alone; what it cost."""

    tokens: Sequence[Scored]
    alone: Sequence[Scored] | None
    metas: list[dict[str, Any]]


def normalized(scored: Scored) -> float:
    return float(np.mean([entry[0] for entry in scored]))
