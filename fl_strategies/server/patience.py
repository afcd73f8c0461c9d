"""The end of a run whose rounds are skipped, one after another, with unusable replies."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fl_strategies.core.reasons import NOT_FINITE, named


class NothingUsable(RuntimeError):
    """Several rounds in a row were skipped, with unusable replies; the text tells each cause once.

    ``diverged`` says that the only cause was numbers that are not finite.
    """

    def __init__(self, text: str, *, diverged: bool = False) -> None:
        super().__init__(text)
        self.diverged = diverged


class Patience:
    """Ends a run whose rounds are skipped, one after another, with unusable replies.

    The run ends after ``rounds`` training rounds in a row that were skipped and had unusable
    replies, if at least two clients answered in them (or the only client that exists). A round
    without such a reply does not count.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._in_a_row = 0
        self._used = 0
        self._causes: dict[str, tuple[str, set[int]]] = {}

    def settle(
        self, used: int, unusable: Mapping[int, str], clients: int, *, skipped: bool
    ) -> None:
        """Note a round; raise :class:`NothingUsable` if it was one too many.

        ``used`` replies were usable; ``clients`` is the number of clients ever connected.
        """
        if not skipped:
            self._in_a_row, self._used, self._causes = 0, 0, {}
        if not skipped or not unusable:
            return
        self._in_a_row += 1
        self._used = max(self._used, used)
        for client, reason in unusable.items():
            # texts of one cause may differ in their numbers from client to client
            self._causes.setdefault(re.sub(r"\d+", "#", reason), (reason, set()))[1].add(client)
        answered = len(self._who()) + self._used
        if self._in_a_row >= self.rounds and answered >= min(2, clients):
            told = "; ".join(
                f"{named(sorted(who))}: {reason}" for reason, who in self._causes.values()
            )
            rounds = f"{self._in_a_row} rounds in a row"
            raise NothingUsable(
                f"{rounds} were skipped, with {self._used} usable replies at most: {told}"
                if self._used
                else f"no reply of {rounds} was usable: {told}",
                diverged=all(NOT_FINITE in reason for reason, _ in self._causes.values()),
            )

    def _who(self) -> set[int]:
        return {client for _, who in self._causes.values() for client in who}
