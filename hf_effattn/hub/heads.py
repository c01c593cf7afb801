"""By which of transformers' Auto classes a model is loaded, and what the Hub calls its task."""

from typing import Any

import transformers

# In the order in which a class that several know is looked for: GPT-2's language model is known to two.
TASKS: dict[str, str | None] = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForSeq2SeqLM": "translation",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForPreTraining": None,
    "AutoModel": "feature-extraction",
}


def auto_class_of(config: Any, architecture: str) -> str | None:
    """The Auto class that makes a model of this class.

    Args:
        config (`PreTrainedConfig`): of the model.
        architecture (`str`): the name of its class, as in `config.architectures`.

    Returns:
        `str`, *optional*: such as `"AutoModelForMaskedLM"`; None where transformers has none for it.
    """
    for name in TASKS:
        mapping = getattr(transformers, name)._model_mapping
        classes = mapping.get(type(config), ())
        if architecture in [kind.__name__ for kind in (classes if isinstance(classes, tuple) else (classes,))]:
            return name
    return None


def task_of(config: Any) -> str | None:
    """The Hub's name for the task of a model that was saved with this configuration; None where it has none."""
    auto_class = auto_class_of(config, config.architectures[0]) if config.architectures else None
    return None if auto_class is None else TASKS[auto_class]
