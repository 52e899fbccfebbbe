"""/v1/models: the one model that is served."""

from __future__ import annotations

from bough.server.context import ModelInfo
from bough.server.errors import HttpError
from bough.server.openai.objects import ModelCard, ModelList


def model_list(model: ModelInfo) -> ModelList:
    return ModelList(data=[model_card(model)])


def model_card(model: ModelInfo) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, root=model.name, max_model_len=model.context_length)


def find_model(model: ModelInfo, name: str) -> ModelCard:
    """The card of the model by this name. Requests may name any model; asking about one is another matter."""
    if name != model.name:
        raise HttpError(404, f"There is no model {name!r} here; this server has {model.name!r}.", "NotFoundError")
    return model_card(model)
