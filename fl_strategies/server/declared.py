"""What a strategy's class declares: checked when the class is defined."""

from __future__ import annotations

from fl_strategies.core.schedules import check_names


def check_declared(cls: type) -> None:
    """Raise ``TypeError`` for a declaration that would be misunderstood."""
    for attribute in ("extra_vectors", "reports"):
        check_names(cls, attribute)
