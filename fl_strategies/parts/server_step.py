"""The server step: how far the global model moves towards what the rule aggregated.

    Delta  = aggregated - theta                                                 (1)
    theta <- theta + step                                                       (2)

theta       global model [d] that the round began with
aggregated  next model [d] of the algorithm's server rule
step        of the part, [d]; without a part step = Delta

Where step = Delta, (2) is aggregated to the bit. Only trained arrays move: buffers get no step. A
skipped round is no step, and leaves the part's state as it was. Clients know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from fl_strategies.core.vectors import Vector
from fl_strategies.parts.part import FREE_MODEL, Need, Part

Stepped: TypeAlias = tuple[Vector, Any, Mapping[str, float]]
"""The step [d], the part's next state, numbers of the round."""


class ServerStep(Part):
    """Base of the server steps."""

    stage = "server_step"
    needs: ClassVar[tuple[Need, ...]] = (FREE_MODEL,)
    needs_distances: ClassVar[bool] = False
    """Whether :meth:`step` asks for ``spread``, and so for each upload's distance."""

    shows_another: ClassVar[bool] = False
    """Whether :meth:`shown` is another model than the one that trains."""

    def begin(self, state: Any, theta: Vector) -> Any:
        """Return the state at the beginning of a ``start`` with the model ``theta`` [d].

        ``state`` is None, or that at the end of the last ``start``.
        """
        raise NotImplementedError

    def step(
        self,
        state: Any,
        theta: Vector,
        delta: Vector,
        server_round: int,
        spread: Callable[[], float],
    ) -> Stepped:
        """Return the step in the place of Delta [d].

        ``spread`` returns sum_i p_i ||w_i - theta||^2 over the uploads w_i, with their weights p_i
        in the rule, which sum to 1.
        """
        raise NotImplementedError

    def shown(self, state: Any, theta: Vector) -> Vector:
        """Return the model [d] that is tested, evaluated and returned when theta trains next."""
        return theta
