"""Classification heads: transformers' generic heads on the backbones of our model families."""

from __future__ import annotations

import sys
from typing import Any

from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from tokenmix_core.modeling.backbone import HybridModel, HybridPreTrainedModel
from tokenmix_core.modeling.config import HybridConfig

# for each kind of head: transformers' class, its auto class, and the prefix of the head's weights, which language
# models lack
HEADS: dict[str, tuple[type, Any, str]] = {
    "SequenceClassification": (GenericForSequenceClassification, AutoModelForSequenceClassification, "score."),
    "TokenClassification": (GenericForTokenClassification, AutoModelForTokenClassification, "score."),
    "QuestionAnswering": (GenericForQuestionAnswering, AutoModelForQuestionAnswering, "qa_outputs."),
}


def register_heads(config: type[HybridConfig], model: type[HybridModel]) -> None:
    """Define models of a family with classification heads, in the module of its backbone.

    Register these models with transformers' auto classes.
    """
    family = model.__name__.removesuffix("Model")
    for head, (generic, auto, new_weights) in HEADS.items():
        name = f"{family}For{head}"
        fields = {
            "__doc__": f"The backbone with transformers' head of `AutoModelFor{head}`.",
            "__module__": model.__module__,
            "config_class": config,
            "new_weights": new_weights,
            # tell the Trainer not to pass `num_items_in_batch`: these heads average their loss over the call
            "accepts_loss_kwargs": False,
        }
        kind = type(name, (generic, HybridPreTrainedModel), fields)
        # make the class an attribute of its module, where pickle looks for it
        setattr(sys.modules[model.__module__], name, kind)
        auto.register(config, kind, exist_ok=True)
