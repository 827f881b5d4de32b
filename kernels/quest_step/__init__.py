"""A decode step of Quest: metadata, select and attention as one operation."""

from sparse_eval.kernels.quest_step.api import StepWorkspace, quest_step, step_workspace

__all__ = ["StepWorkspace", "quest_step", "step_workspace"]
