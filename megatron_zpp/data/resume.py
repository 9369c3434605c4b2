"""What a resumed run reads, also with other weights or other data sets.

A checkpoint says since which sample the weights hold, and how much of every data set was read by then. From
there on the blend of these weights says which data set a sample is of, and its number there is what was read
by then and what the blend has given since. So a change loses and repeats no sample of any data set, whatever
the number of ranks and however often the weights change; and where nothing changes no sample moves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.blend import Blend, BlendedDataset
from megatron_zpp.data.dataset_progress import DatasetProgress, ResumedBlend, SourceProgress
from megatron_zpp.data.documents import MaskedSamples
from megatron_zpp.data.samples import KnownSamples, Samples
from megatron_zpp.data.windows import order_seed

_SAME = 1e-12  # of a share: 3 and 7 are 0.3 and 0.7
_ANEW = (
    " WARNING: other data sets or weights than before, and it is not known how far each was read: "
    "from here on samples are numbered by the present ones, so that some may repeat or be left out"
)


@dataclass(frozen=True)
class ResumedData:
    """What a run resumes with: samples, what to keep in its checkpoints, and lines for the log."""

    samples: Samples
    dataset_progress: DatasetProgress | None
    lines: list[str]


def resume_data(
    samples: Samples, saved: DatasetProgress | None, *, consumed: int, data: DataConfig, train_seed: int
) -> ResumedData:
    """The training samples of a run that resumes after `consumed` samples of the order in `saved`.

    Data sets are told apart by their contents, so one that was moved continues; a new one begins, and one
    that was left out keeps its place for when it is back. `train_seed` is the split's. Raises ValueError
    for another blend in Megatron-LM's order, which is made for the whole of a run.
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
    partners = _partners(saved.sets, beginning.sets)
    if _same_shares(saved, partners, weights):
        dataset_progress = _renamed(saved, beginning)
        return ResumedData(_arranged(samples, dataset_progress, train_seed), dataset_progress, [])
    if data.dataset_order == "megatron":
        flag = "--data-path" if data.data_path else "--train-data-path"
        fix = (
            f"the run began with {_listed(saved)}, and --dataset-order megatron is made for a whole run; "
            "give these again, or begin a new run from its weights with --finetune"
        )
        raise option_error(flag, data.data_path or data.train_data_path, fix)
    if any(part.weight is None for part in saved.reading):
        return ResumedData(samples, beginning, [_ANEW])
    dataset_progress = _changed(saved, beginning, partners, consumed)
    return ResumedData(
        _arranged(samples, dataset_progress, train_seed),
        dataset_progress,
        _said(saved, dataset_progress, partners, consumed),
    )


def _parts(samples: Samples) -> tuple[Sequence[KnownSamples], tuple[float, ...]]:
    """The data sets; SeededSamples but for Megatron-LM's order."""
    if isinstance(samples, BlendedDataset):
        return samples.sources, samples.blend.weights
    return (samples,), (1.0,)


def _beginning(order: str, sources: Sequence[KnownSamples], weights: Sequence[float]) -> DatasetProgress:
    """Of a run that has read nothing."""
    sets = (
        SourceProgress(source.name, source.fingerprint(), number, float(weight), 0)
        for number, (source, weight) in enumerate(zip(sources, weights, strict=True))
    )
    return DatasetProgress(order, 0, tuple(sets))


def _partners(saved: Sequence[SourceProgress], present: Sequence[SourceProgress]) -> list[int | None]:
    """Which of the saved data sets each present one is; None for a new one."""
    rules: tuple[Callable[[SourceProgress, SourceProgress], bool], ...] = (
        lambda old, new: old.fingerprint == new.fingerprint and old.prefix == new.prefix,
        lambda old, new: old.fingerprint == new.fingerprint,
        lambda old, new: not old.fingerprint and old.prefix == new.prefix,
        lambda old, new: not old.fingerprint and Path(old.prefix).name == Path(new.prefix).name,
    )
    found: list[int | None] = [None] * len(present)
    free = dict(enumerate(saved))
    for same in rules:
        for number, new in enumerate(present):
            if found[number] is None:
                found[number] = next((k for k, old in free.items() if same(old, new)), None)
                free.pop(found[number], None)
    return found


def _same_shares(saved: DatasetProgress, partners: list[int | None], weights: Sequence[float]) -> bool:
    """Whether the run reads the same data sets in the same proportions as before."""
    before = [part.weight for part in saved.reading]
    if partners != list(range(len(before))):
        return False
    if None in before or len(before) == 1:
        return len(before) == 1 or set(before) == {None}
    pairs = zip(before, weights, strict=True)
    return all(math.isclose(a / sum(before), b / sum(weights), rel_tol=_SAME) for a, b in pairs)


def _renamed(saved: DatasetProgress, beginning: DatasetProgress) -> DatasetProgress:
    """`saved` with the data sets as they are called and known now."""
    present = (
        replace(
            old,
            prefix=new.prefix,
            fingerprint=new.fingerprint,
            weight=new.weight if old.weight is None else old.weight,
        )
        for old, new in zip(saved.reading, beginning.sets, strict=True)
    )
    return replace(saved, sets=(*present, *saved.sets[len(beginning.sets) :]))


def _changed(
    saved: DatasetProgress, beginning: DatasetProgress, partners: list[int | None], consumed: int
) -> DatasetProgress:
    """The present data sets, each from where it stands after `consumed` samples, and those left out."""
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
    """The data sets of `samples` as `dataset_progress` says; `samples` itself where that is the same."""
    sources, weights = _parts(samples)
    reading = dataset_progress.reading
    as_begun = all(part.stream == number for number, part in enumerate(reading))
    if dataset_progress.order == "megatron" or (
        as_begun
        and not dataset_progress.since
        and (len(reading) == 1 or weights == tuple(p.weight for p in reading))
    ):
        return samples
    pairs = zip(sources, reading, strict=True)
    moved = tuple(source.with_seed(order_seed(train_seed, part.stream)) for source, part in pairs)
    blend = Blend(tuple(part.weight for part in reading))
    return BlendedDataset(
        moved, ResumedBlend(blend, dataset_progress.since, tuple(part.consumed_before for part in reading))
    )


def _said(
    saved: DatasetProgress, dataset_progress: DatasetProgress, partners: list[int | None], consumed: int
) -> list[str]:
    """A line for the change, and one for each data set: its share before and now, and where it continues."""
    reading = dataset_progress.reading
    before, now = (_shares(each) for each in (saved, dataset_progress))
    lines = [f" the blend changes at sample {consumed:,}; each data set continues from where it was:"]
    known = {part.prefix for part in saved.sets}
    for number, (part, partner) in enumerate(zip(reading, partners, strict=True)):
        old = before[partner] if partner is not None else 0.0
        where = f"from its sample {part.consumed_before:,} on"
        if partner is None:
            where = "anew, as its contents have changed" if part.prefix in known else "from its beginning"
        lines.append(f"   {old:.2%} -> {now[number]:.2%} {part.prefix}, {where}")
    for number, old in enumerate(saved.reading):
        if number not in partners:
            consumed_before = saved.consumed_by(consumed)[number]
            lines.append(
                f"   {before[number]:.2%} -> 0 {old.prefix}, left out after {consumed_before:,} samples"
            )
    return lines


def _shares(dataset_progress: DatasetProgress) -> list[float]:
    total = sum(part.weight for part in dataset_progress.sets)
    return [part.weight / total for part in dataset_progress.sets]


def _listed(dataset_progress: DatasetProgress) -> str:
    """The data sets as they are given on a command line."""
    parts = ([] if part.weight is None else [f"{part.weight:g}"] for part in dataset_progress.reading)
    return " ".join(
        " ".join((*w, part.prefix)) for w, part in zip(parts, dataset_progress.reading, strict=True)
    )
