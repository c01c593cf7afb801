"""Improved clustered attention on a GPU: clustered attention with top keys."""

from ...clustered_attention.reference import Inputs
from ...clustered_attention.triton import fake, forward, gradients
from ...shared.gradients import register_op

improved_clustered_attention = register_op(
    "improved_clustered_attention_triton", Inputs, forward, gradients, fake=fake, keeps=slice(1, None)
)
