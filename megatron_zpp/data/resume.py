"""The training samples of a resumed run, whose weights or data sets may have changed.

A checkpoint records since which sample its weights hold, and how much of each data set had been read by then.
From that sample on, the blend of these weights determines the data set of each sample. The sample's number in
its data set is the count read before the change plus the count that the blend has drawn since. So a change
neither skips nor repeats a sample of any data set, for any number of ranks and of changes. Without a change,
no sample moves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.blend import BlendedDataset
from megatron_zpp.data.dataset_progress import DatasetProgress, SourceProgress
from megatron_zpp.data.documents import MaskedSamples
from megatron_zpp.data.samples import KnownSamples, Samples, ShardRecord
from megatron_zpp.data.windows import order_seed

_TOLERANCE = 1e-12  # relative, of shares: weights 3 and 7 are 0.3 and 0.7
_RENUMBERED = (
    " WARNING: data sets or weights have changed, and how far each was read is unknown: "
    "from here on samples are numbered by the present data sets, so some may be repeated or skipped"
)


@dataclass(frozen=True)
class ResumedData:
    """Training samples of a resumed run, the progress to save in checkpoints, and lines for the log."""

    samples: Samples
    dataset_progress: DatasetProgress | None
    lines: list[str]


def resume_data(
    samples: Samples, saved: DatasetProgress | None, *, consumed: int, data: DataConfig, train_seed: int
) -> ResumedData:
    """Return the training samples of a run that resumes after `consumed` samples of the order in `saved`.

    Data sets are recognised by their contents, so a data set that was moved continues where it was. A new one
    starts at its beginning. The position of an omitted one is kept until it is used again. `train_seed` is
    the seed of the split. Raises ValueError for a changed blend in Megatron-LM's order, which is built for a
    whole run, and for text in shards that has the same name, but not the same shards.
    """
    if isinstance(samples, MaskedSamples):
        inner = resume_data(samples.samples, saved, consumed=consumed, data=data, train_seed=train_seed)
        return replace(inner, samples=replace(samples, samples=inner.samples))
    if data.mock_data:
        return ResumedData(samples, None, [])
    sources, weights = _parts(samples)
    beginning = _beginning(data.dataset_order, sources, weights)
    if saved is None or saved.order != data.dataset_order or not consumed:
        return ResumedData(samples, beginning, [])
    flag = "--data-path" if data.data_path else "--train-data-path"
    _check_shards(flag, saved, beginning)
    partners = _partners(saved.sets, beginning.sets, [each.source.older_fingerprints() for each in sources])
    if _same_shares(saved, partners, weights):
        dataset_progress = _renamed(saved, beginning)
        return ResumedData(_arranged(samples, dataset_progress, train_seed), dataset_progress, [])
    if data.dataset_order == "megatron":
        fix = (
            f"the run began with {_listed(saved)}, and --dataset-order megatron is built for a whole run; "
            "give these again, or start a new run from its weights with --finetune"
        )
        raise option_error(flag, data.data_path or data.train_data_path, fix)
    if any(part.weight is None for part in saved.reading):
        return ResumedData(samples, beginning, [_RENUMBERED])
    dataset_progress = _changed(saved, beginning, partners, consumed)
    return ResumedData(
        _arranged(samples, dataset_progress, train_seed),
        dataset_progress,
        _describe_change(saved, dataset_progress, partners, consumed),
    )


def _parts(samples: Samples) -> tuple[Sequence[KnownSamples], tuple[float, ...]]:
    if isinstance(samples, BlendedDataset):
        return samples.sources, samples.blend.weights
    assert isinstance(samples, KnownSamples), f"not samples of a data set: {samples}"
    return (samples,), (1.0,)


def _beginning(order: str, samples: Sequence[KnownSamples], weights: Sequence[float]) -> DatasetProgress:
    """Return the progress of a run that has read nothing."""
    pairs = zip([each.source for each in samples], weights, strict=True)
    sets = (
        SourceProgress(source.name, source.fingerprint(), number, float(weight), 0, source.shards())
        for number, (source, weight) in enumerate(pairs)
    )
    return DatasetProgress(order, 0, tuple(sets))


def _check_shards(flag: str, saved: DatasetProgress, beginning: DatasetProgress) -> None:
    """Raise ValueError if a shard that the run has begun with was changed, removed or added."""
    for new in beginning.sets:
        namesakes = [old for old in saved.sets if old.prefix == new.prefix and old.shards and new.shards]
        faults = [changed_shard(old.shards, new.shards) for old in namesakes]
        if faults and all(faults):
            fix = (
                f"shard {faults[0]}, and the order of samples follows from all shards; restore the shards of "
                "the checkpoint, or start a new run from its weights with --finetune"
            )
            raise option_error(flag, new.prefix, fix)


def changed_shard(saved: Sequence[ShardRecord], present: Sequence[ShardRecord]) -> str | None:
    """Return the name of a shard and what happened to it, None if all shards are as they were.

    Shards that were moved to another directory together are the same shards: of the same contents in the same
    order, whatever their names. A file that is where it was, but has another modification time, has changed:
    its contents are compared in part only.
    """
    before, now = ({shard.name for shard in shards} for shards in (saved, present))
    moved = before.isdisjoint(now)
    for old, new in zip_longest(saved, present):
        if new is None or (not moved and old and old.name not in now):
            return f"{old.name} is missing since the checkpoint"
        if old is None or (not moved and new.name not in before):
            return f"{new.name} is new since the checkpoint"
        if (old.contents, not moved and old.name) != (new.contents, not moved and new.name):
            return f"{new.name} has changed since the checkpoint"
        if not moved and old.modified != new.modified:
            return f"{new.name} was modified since the checkpoint"
    return None


def _partners(
    saved: Sequence[SourceProgress], present: Sequence[SourceProgress], older: Sequence[tuple[str, ...]]
) -> list[int | None]:
    """Return the index of each present data set among the saved ones, None for a new data set.

    `older` are the fingerprints that earlier versions gave each present data set.
    """
    rules: tuple[Callable[[SourceProgress, SourceProgress, tuple[str, ...]], bool], ...] = (
        lambda old, new, _: old.fingerprint == new.fingerprint and old.prefix == new.prefix,
        lambda old, new, former: old.fingerprint in former and old.prefix == new.prefix,
        lambda old, new, _: old.fingerprint == new.fingerprint,
        lambda old, new, former: old.fingerprint in former,
        lambda old, new, _: not old.fingerprint and old.prefix == new.prefix,
        lambda old, new, _: not old.fingerprint and Path(old.prefix).name == Path(new.prefix).name,
    )
    found: list[int | None] = [None] * len(present)
    free = dict(enumerate(saved))
    for same in rules:
        for number, new in enumerate(present):
            if found[number] is None:
                partner = next((k for k, old in free.items() if same(old, new, older[number])), None)
                if partner is not None:
                    found[number] = partner
                    del free[partner]
    return found


def _same_shares(saved: DatasetProgress, partners: list[int | None], weights: Sequence[float]) -> bool:
    """Whether the run reads the same data sets in the same proportions as before."""
    if partners != list(range(len(saved.reading))):
        return False
    if len(saved.reading) == 1:
        return True
    before = saved.weights
    if before is None:
        return all(part.weight is None for part in saved.reading)
    pairs = zip(before, weights, strict=True)
    return all(math.isclose(a / sum(before), b / sum(weights), rel_tol=_TOLERANCE) for a, b in pairs)


def _renamed(saved: DatasetProgress, beginning: DatasetProgress) -> DatasetProgress:
    """Return `saved` with the present prefixes, fingerprints and, where unknown, weights."""
    present = (
        replace(
            old,
            prefix=new.prefix,
            fingerprint=new.fingerprint,
            shards=new.shards,
            weight=new.weight if old.weight is None else old.weight,
        )
        for old, new in zip(saved.reading, beginning.sets, strict=True)
    )
    return replace(saved, sets=(*present, *saved.sets[len(beginning.sets) :]))


def _changed(
    saved: DatasetProgress, beginning: DatasetProgress, partners: list[int | None], consumed: int
) -> DatasetProgress:
    """Return the present data sets, then the omitted ones, each at its position after `consumed` samples."""
    before = saved.consumed_by(consumed)
    stream = 1 + max(part.stream for part in saved.sets)
    sets = []
    for new, partner in zip(beginning.sets, partners, strict=True):
        if partner is None:
            sets.append(replace(new, stream=stream))
            stream += 1
        else:
            sets.append(replace(new, stream=saved.sets[partner].stream, consumed_before=before[partner]))
    for number, old in enumerate(saved.sets):
        if number not in partners:
            sets.append(replace(old, weight=0.0, consumed_before=before[number]))
    return DatasetProgress(saved.order, consumed, tuple(sets))


def _arranged(samples: Samples, dataset_progress: DatasetProgress, train_seed: int) -> Samples:
    """Return `samples` in the order of `dataset_progress`."""
    sources, weights = _parts(samples)
    reading = dataset_progress.reading
    first_streams = all(part.stream == number for number, part in enumerate(reading))
    same_weights = len(reading) == 1 or weights == dataset_progress.weights
    unchanged = first_streams and same_weights and not dataset_progress.since
    if dataset_progress.order == "megatron" or unchanged:
        return samples
    pairs = zip(sources, reading, strict=True)
    moved = tuple(source.with_seed(order_seed(train_seed, part.stream)) for source, part in pairs)
    return BlendedDataset(moved, dataset_progress.blend)


def _describe_change(
    saved: DatasetProgress, dataset_progress: DatasetProgress, partners: list[int | None], consumed: int
) -> list[str]:
    """Return a line for the change and one per data set: shares before and now, where it continues."""
    before, now = (_shares(each) for each in (saved, dataset_progress))
    lines = [f" the blend changes at sample {consumed:,}; each data set continues from where it was:"]
    known = {part.prefix for part in saved.sets}
    for number, (part, partner) in enumerate(zip(dataset_progress.reading, partners, strict=True)):
        share = before[partner] if partner is not None else 0.0
        where = f"from its sample {part.consumed_before:,} on"
        if partner is None:
            changed = part.prefix in known
            where = "from its beginning" + (", because its contents have changed" if changed else "")
        lines.append(f"   {share:.2%} -> {now[number]:.2%} {part.prefix}, {where}")
    for number, old in enumerate(saved.reading):
        if number not in partners:
            read = saved.consumed_by(consumed)[number]
            lines.append(f"   {before[number]:.2%} -> 0 {old.prefix}, omitted after {read:,} samples")
    return lines


def _shares(dataset_progress: DatasetProgress) -> list[float]:
    weights = [part.weight or 0.0 for part in dataset_progress.sets]
    total = sum(weights)
    return [weight / total for weight in weights]


def _listed(dataset_progress: DatasetProgress) -> str:
    """Return the data sets as they are written on a command line."""
    entries: list[str] = []
    for part in dataset_progress.reading:
        entries += [part.prefix] if part.weight is None else [f"{part.weight:g}", part.prefix]
    return " ".join(entries)
