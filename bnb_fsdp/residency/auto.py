"""When "auto" moves state again after it has decided: from the free memory of one device at step boundaries."""

from __future__ import annotations

PATIENCE = 20
"""Looks at free memory, of which all have to find enough of it, before state comes back to the device."""

MOST_PATIENCE = 20_000


class Watch:
    """What was seen of one device since "auto" last decided.

    Less is free than the reserve: torch's cache is emptied first, as it may hold what nobody needs any more, and the
    next iteration shows what it does need; state leaves if that is not enough or was tried within the last `PATIENCE`
    looks. State comes back when twice the reserve was free at every one of `PATIENCE` looks, of twice as many after
    each time that it left.
    """

    def __init__(self) -> None:
        self._patience = PATIENCE
        self._quiet = PATIENCE
        self._looks = 0
        self._least = 0

    def is_short(self) -> bool:
        """Less than the reserve is free: whether the cache should be emptied now."""
        lately = self._quiet < PATIENCE
        self._quiet = self._looks = 0
        return not lately

    def gave_back(self) -> None:
        """State leaves the device."""
        self._patience = min(2 * self._patience, MOST_PATIENCE)

    def can_take(self, free: int, reserve: int) -> int:
        """``free`` bytes, no less than ``reserve``: how many of them state in host memory may take now."""
        self._quiet += 1
        self._least = min(self._least, free) if self._looks else free
        self._looks += 1
        if self._looks < self._patience:
            return 0
        self._looks = 0
        # As much stays free as `gives_back` leaves, half a reserve above where state would have to leave again.
        return self._least - reserve - reserve // 2 if self._least >= 2 * reserve else 0


def gives_back(budget: int, held: int, free: int, reserve: int) -> int:
    """The budget, once less than ``reserve`` is ``free``, of state that takes ``held`` bytes of the device: half a
    reserve more than is missing leaves, lest the next step asks again."""
    return max(0, min(held, budget) - (reserve - free) - reserve // 2)
