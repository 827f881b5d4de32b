"""Quest's page selection: metadata of full pages, bound scores, the best pages."""

from sparse_eval.kernels.quest_select.api import (
    GROUP_RULES,
    can_select,
    quest_select,
    update_metadata,
)

__all__ = ["GROUP_RULES", "can_select", "quest_select", "update_metadata"]
