"""RoBERTa and XLM-R (multilingual E5, BGE-M3 and its rerankers): BERT with positions from the third row of their table
on, and a head of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.models.bert import Bert
from bough.models.names import Names


class Roberta(Bert):
    architectures = tuple(
        f"{name}{kind}"
        for name in ("Roberta", "XLMRoberta")
        for kind in ("Model", "ForSequenceClassification", "ForMaskedLM")
    )
    model_types = ("roberta", "xlm-roberta")
    prefix = "roberta"
    first_position = 2  # behind that of padding, whose token id is 1
    defaults: ClassVar[dict[str, Any]] = {**Bert.defaults, "type_vocab_size": 1, "layer_norm_eps": 1e-5}

    def head(self) -> Names:
        return {"classifier.dense": "score.hidden", "classifier.out_proj": "score.out"}
