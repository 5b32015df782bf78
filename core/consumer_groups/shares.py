"""Equal shares: the number of partitions that each worker of a consumer group should own."""

from __future__ import annotations

from collections.abc import Mapping


def targets(holding: Mapping[str, int], capacities: Mapping[str, int | None], partitions: int) -> dict[str, int]:
    """By worker, the floor or the ceiling of an equal share of `partitions`, within its capacity (None: no limit).

    The larger shares go to the workers that hold most now, so that few partitions move. If a worker joins a balanced
    consumer group, it gets the floor, and no other worker gains a partition. Ties are broken by name. Partitions beyond
    one worker's capacity are shared among the others. Partitions beyond all capacities have no owner.
    """
    shares: dict[str, int] = {}
    remaining, room = partitions, dict.fromkeys(holding, partitions)
    room |= {worker: capacity for worker, capacity in capacities.items() if capacity is not None and worker in room}
    # Workers whose capacity is below the equal share get their capacity, and the others share the rest. Repeat until no
    # capacity is below the share.
    while room and (full := [worker for worker, places in room.items() if places <= remaining // len(room)]):
        for worker in full:
            shares[worker] = room.pop(worker)
            remaining -= shares[worker]
    if room:
        floor, larger = divmod(remaining, len(room))
        for place, worker in enumerate(sorted(room, key=lambda worker: (-holding[worker], worker))):
            shares[worker] = floor + (place < larger)
    return shares
