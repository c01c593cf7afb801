"""Making models known to transformers: to its Auto classes, and where it asks for the name of a class instead."""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

# Trainer shifts smoothed labels only for the first; the pipelines of all three log an error about other names.
NAMES: dict[Any, dict[str, Any]] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


def register(config_class: type[PreTrainedConfig], model_classes: dict[Any, type[PreTrainedModel]]) -> None:
    """Register a configuration and its models; a second time changes nothing.

    Args:
        config_class (`type`): the configuration.
        model_classes (`dict`): the model of each Auto class.
    """
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto_class, model_class in model_classes.items():
        auto_class.register(config_class, model_class, exist_ok=True)
        if auto_class in NAMES:
            NAMES[auto_class][config_class.model_type] = model_class.__name__
