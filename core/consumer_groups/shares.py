"""Equal shares: how many partitions each worker of a group should hold. Pure; the same answer whoever asks."""

from __future__ import annotations

from collections.abc import Mapping


def targets(holding: Mapping[str, int], capacities: Mapping[str, int | None], partitions: int) -> dict[str, int]:
    """By worker, the floor or the ceiling of an equal share of `partitions`, within its capacity (None: any number).

    The shares that are one larger stay with those that hold most now, ties by name, so that as little as possible
    moves: whoever joins a group at rest takes the floor of its share, and nobody else takes anything. What is above a
    worker's capacity is shared among the others; what is above all capacities belongs to nobody.
    """
    shares: dict[str, int] = {}
    left, room = partitions, dict.fromkeys(holding, partitions)
    room |= {worker: capacity for worker, capacity in capacities.items() if capacity is not None and worker in room}
    # Water rises in vessels of several heights: one that is full leaves its share to the others.
    while room and (full := [worker for worker, most in room.items() if most <= left // len(room)]):
        for worker in full:
            shares[worker] = room.pop(worker)
            left -= shares[worker]
    if room:
        floor, larger = divmod(left, len(room))
        for place, worker in enumerate(sorted(room, key=lambda worker: (-holding[worker], worker))):
            shares[worker] = floor + (place < larger)
    return shares
