"""The end of a run in which no reply can be used."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fl_strategies.core.reasons import NOT_FINITE, named


class NothingUsable(RuntimeError):
    """Every reply was unusable, in several rounds in a row; the text tells each cause once.

    ``diverged`` says that the only cause was numbers that are not finite.
    """

    def __init__(self, text: str, *, diverged: bool = False) -> None:
        super().__init__(text)
        self.diverged = diverged


class Patience:
    """Ends a run in which no reply can be used.

    The run ends after ``rounds`` training rounds in a row in which clients answered and no reply
    was usable, if at least two clients answered in them (or the only client that exists). A round
    without any answer does not count.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._in_a_row = 0
        self._causes: dict[str, tuple[str, set[int]]] = {}

    def settle(self, used: int, unusable: Mapping[int, str], clients: int) -> None:
        """Note a round; raise :class:`NothingUsable` if it was one too many.

        ``used`` replies were usable; ``clients`` is the number of clients ever connected.
        """
        if used:
            self._in_a_row, self._causes = 0, {}
        if used or not unusable:
            return
        self._in_a_row += 1
        for client, reason in unusable.items():
            # texts of one cause may differ in their numbers from client to client
            self._causes.setdefault(re.sub(r"\d+", "#", reason), (reason, set()))[1].add(client)
        if self._in_a_row >= self.rounds and len(self._who()) >= min(2, clients):
            told = "; ".join(
                f"{named(sorted(who))}: {reason}" for reason, who in self._causes.values()
            )
            raise NothingUsable(
                f"no reply of {self._in_a_row} rounds in a row was usable: {told}",
                diverged=all(NOT_FINITE in reason for reason, _ in self._causes.values()),
            )

    def _who(self) -> set[int]:
        return {client for _, who in self._causes.values() for client in who}
