"""Model cards, and pushing models with them to the Hub."""

from .card import loading_code, model_card
from .evaluations import evaluations_of
from .heads import task_of
from .push import push_folder, push_to_hub

__all__ = ["evaluations_of", "loading_code", "model_card", "push_folder", "push_to_hub", "task_of"]
