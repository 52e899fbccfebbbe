"""How `select` decides: methods that turn the logprobs of the choices' tokens into one choice.

A method is called with what a back end has scored; what it hands back besides its decision ends up in the variable's
meta information. Users may write their own by subclassing `ChoicesSamplingMethod`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import numpy as np

from bough.core.errors import RequestError

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


# From texts to scored choices. "is " + "yes" may be tokenised as "is" + " yes", so text and text + choice are tokenised
# whole. The tokens that count begin where the first of them differs from the text alone, at the same place for all
# choices, so that probabilities after the same tokens are compared.


@dataclass(frozen=True, slots=True)
class Scores:
    """The tokens of each choice with their logprobs, after the text and, where asked for, alone; what it cost."""

    tokens: Sequence[Scored]
    alone: Sequence[Scored] | None
    metas: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """The prompts of one batch: one for each choice, then one for each choice alone where those are needed."""

    prompts: list[list[int]]
    starts: list[int]  # position of each prompt whose successors are scored
    choices: int

    @property
    def request(self) -> dict[str, Any]:
        return {
            "input_ids": self.prompts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": self.starts,
            "return_text_in_logprobs": True,
        }

    def read(self, metas: list[dict[str, Any]]) -> Scores:
        """Sorts what came back."""
        entries = [meta["input_token_logprobs"] for meta in metas]
        # The first entry is the token before those that are scored.
        tokens = [[_finite(entry) for entry in given[1:]] for given in entries[: self.choices]]
        alone: list[Scored] | None = entries[self.choices :] or None
        return Scores(tokens, alone, metas)


def plan_scoring(text_ids: Sequence[int], full_ids: Sequence[Sequence[int]], *, unconditional: bool) -> ScoringPlan:
    """`text_ids` is the text before the choices, `full_ids` the text with each of them."""
    border = min(len(commonprefix([list(text_ids), list(ids)])) for ids in full_ids)  # noqa: RUF071  # not of paths
    border = min(border, *(len(ids) - 1 for ids in full_ids))
    if border < 1:
        raise RequestError("select() scores its choices after some text; add text to the state before it.")
    alone = [list(ids[border:]) for ids in full_ids] if unconditional else []
    prompts = [list(ids) for ids in full_ids]
    return ScoringPlan(prompts + alone, [border - 1] * len(prompts) + [0] * len(alone), len(prompts))


def normalized(scored: Scored) -> float:
    return float(np.mean([entry[0] for entry in scored]))


def _finite(entry: Sequence[Any]) -> tuple[float, int, str | None]:
    """A token that the model holds for impossible has no number in JSON."""
    logprob, token, text = entry
    return (-math.inf if logprob is None else logprob, token, text)
