"""RoBERTa and XLM-R (multilingual E5, BGE-M3 and its rerankers): BERT with positions from the third row of their table
on, and a head of its own."""

from __future__ import annotations

from typing import ClassVar

from bough.models.bert import Bert
from bough.models.names import Names

KINDS = ("Model", "ForSequenceClassification", "ForMaskedLM")


class Roberta(Bert):
    architectures = tuple(f"{name}{kind}" for name in ("Roberta", "XLMRoberta") for kind in KINDS)
    model_types = ("roberta", "xlm-roberta")
    prefix = "roberta."
    first_position = 2  # behind that of padding, whose token id is 1
    head: ClassVar[Names] = {"classifier.dense": "score.hidden", "classifier.out_proj": "score.out"}
