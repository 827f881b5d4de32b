"""A decode step of Quest: metadata, select and attention as one operation."""

from sparse_eval.kernels.quest_step.api import quest_step

__all__ = ["quest_step"]
