"""The duration of a call while nothing else runs: one connection, one call at a time, compared with the usual recipe
(rows in a table and a thread for each request) on the same MariaDB.

`python -m bench.idle seal` measures only this verb; the names are those of `verbs`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import measure, verbs
from bench.measure import Scale
from bench.peer import row_recipe

NAMES = tuple(name for name, verb in verbs.VERBS.items() if verb.in_recipe)


def _round(port: int, names: Sequence[str], calls: int) -> dict[str, float]:
    """Median seconds of a call, by the verb's title."""
    return {verbs.VERBS[name].title: verbs.drive(port, verbs.VERBS[name], calls, 1).p50 for name in names}


def run(scale: Scale, names: Sequence[str] = NAMES) -> None:
    calls = max(scale.requests // 40, 20)
    lastbit_rounds: list[dict[str, float]] = []
    recipe_rounds: list[dict[str, float]] = []
    with measure.mariadb() as server, measure.lastbit_on(server) as service, row_recipe.served(server) as recipe:
        sides = ((service.port, lastbit_rounds), (recipe, recipe_rounds))
        for port, _ in sides:
            _round(port, names, min(calls, 100))  # the first calls of a process are slower
        for number in range(scale.rounds):
            by_name: list[dict[str, float]] = [{}, {}]
            for name in names:
                # The sides alternate in changing order, so that both run under the same conditions.
                for side in (0, 1) if number % 2 else (1, 0):
                    by_name[side] |= _round(sides[side][0], [name], calls)
            for (_, rounds), seconds in zip(sides, by_name, strict=True):
                rounds.append(seconds)
    measure.show(
        f"idle: one connection, MariaDB (medians of {scale.rounds} rounds of {calls})",
        ["", "recipe, ms", "Lastbit, ms", "ratio"],
        measure.compared(recipe_rounds, lastbit_rounds),
        "ratio: Lastbit's time divided by the recipe's, so below 1 Lastbit is faster",
    )


if __name__ == "__main__":
    measure.alone(run, NAMES)
