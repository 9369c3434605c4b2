"""The longest sample that fits with the settings of a run."""

from dataclasses import replace

from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.memory import memory_of

_STEP, _MOST = 1024, 2**24  # tokens: between candidates, and of the last one


def longest_sample(job: Job, gibibytes: float) -> int:
    """Tokens of the longest sample with which the job fits; 0 if it does not fit with the shortest.

    A multiple of 1,024 tokens per rank that shares samples or layers. Where positions are learned, their
    table is as long.
    """
    step = _STEP * job.context * job.tensor
    few, many = 0, 1  # steps: those that fit, and those that do not
    while many * step <= _MOST and _fits(job, many * step, gibibytes):
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if _fits(job, middle * step, gibibytes) else (few, middle)
    return few * step


def _fits(job: Job, tokens: int, gibibytes: float) -> bool:
    return memory_of(with_samples_of(job, tokens)).fits(gibibytes)


def with_samples_of(job: Job, tokens: int) -> Job:
    """The job with samples of so many tokens."""
    if job.model.position_embedding_type != "learned_absolute":
        most = max(tokens, job.model.max_position_embeddings)
        return job.varied(model=replace(job.model, seq_length=tokens, max_position_embeddings=most))
    model = replace(job.model, seq_length=tokens, max_position_embeddings=tokens)
    cut, rows = job.zero.cuts_layers, job.zero.zero_table_rows
    small = units_of(
        replace(model, num_layers=1, window_attn_skip_freq=None),
        job.vocab_size,
        job.tensor,
        cut_layers=cut,
        table_rows=rows,
    )
    first, stop = job.first_layer, len(small) - len(job.layer_layouts) - job.first_layer
    units = [*small[:first], *job.units[first : len(job.units) - stop], *small[len(small) - stop :]]
    return job.varied(model=model, units=units)
