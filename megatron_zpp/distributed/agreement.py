"""Checks, before anything is built, that all ranks were started with the same settings and data."""

import json
from typing import Any

from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.rank_addresses import ranges


def check_agreement(settings: dict[str, dict[str, Any]], exchange: Exchange, fix: str) -> None:
    """Compare `settings`, by part and field, over all ranks. Every rank must call this.

    Raises the same ValueError on every rank, naming the first field that differs and the remedy `fix`.
    """
    fields = {f"{part}.{name}": value for part, values in settings.items() for name, value in values.items()}
    own = json.loads(json.dumps(fields))
    if exchange.topology.rank == 0:
        exchange.put("settings", own)
    first = exchange.get("settings")
    names = sorted(first.keys() | own.keys())
    absent = "(unknown setting)"
    name = next((name for name in names if first.get(name, absent) != own.get(name, absent)), None)
    difference = None if name is None else [name, first.get(name, absent), own.get(name, absent)]
    if problem := exchange.combine("differs", difference, _problem):
        raise ValueError(f"{problem}; {fix}")


def _problem(differences: list[Any]) -> str | None:
    """The first field that differs from rank 0's, its value on the ranks where it does; None if none differs.

    A rank's difference is the field, rank 0's value and the rank's own.
    """
    problems = {rank: difference for rank, difference in enumerate(differences) if difference}
    if not problems:
        return None
    name, expected, got = next(iter(problems.values()))
    ranks = [rank for rank, problem in problems.items() if problem[0] == name]
    return (
        f"{name} differs between ranks: rank{'s' * (len(ranks) > 1)} {ranges(ranks)} and rank 0 have "
        f"different values (rank {ranks[0]}: {got}, rank 0: {expected})"
    )
