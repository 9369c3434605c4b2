"""Writes the report of a run: `megatron-zpp report METRICS.jsonl --output report.html`.

The page has curves, times, traffic and samples from the metrics file. With `--checkpoint` it also has the
settings of the run, and its planned memory and traffic beside what was measured. It needs no network.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.directory import each_candidate, read_newest
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.config.command_line import command_options, program_name
from megatron_zpp.config.options import REQUIRED, Options, flag_of, option, option_error, optional
from megatron_zpp.config.root import Config
from megatron_zpp.config.sources.settings_file import not_implied
from megatron_zpp.mesh import Mesh
from megatron_zpp.plan.exchanges import ledgers_of
from megatron_zpp.plan.job import Job, job_of
from megatron_zpp.plan.memory import PARTS, memory_of
from megatron_zpp.plan.traffic import total, traffic_of
from megatron_zpp.reporting.console import warn
from megatron_zpp.reporting.report.curves import Axis, by_iteration, read_metrics
from megatron_zpp.reporting.report.page import Comparison, Records, Report, Setting, page
from megatron_zpp.storage.files import check_replaceable, write_text
from megatron_zpp.storage.location import Location
from megatron_zpp.train.schedule.run_schedule import RunSchedule


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Options):
    """report: a page about a run"""

    metrics: str = option(REQUIRED, "The run's --metrics-file.", positional=True)
    output: str = option("report.html", "Page to write.")
    checkpoint: str | None = optional("The run's --save directory, for its settings and its plan.")
    ckpt_step: int | None = optional(
        "Iteration of the checkpoint; default the newest.", needs="--checkpoint DIRECTORY", at_least=0
    )
    x: Axis = option("iteration", "The axis below the curves.")
    smoothing: float = option(0.6, "Weight of the past in the smoothed loss; 0: off.", at_least=0, below=1)
    title: str | None = optional("Title of the page; default the name of the metrics file.")


def main() -> None:
    """Write the page that the command line asks for."""
    config = command_options(ReportConfig, __doc__)
    check_replaceable("--output", config.output)
    if os.path.realpath(config.output) == os.path.realpath(config.metrics):
        raise option_error("--output", config.output, "is the metrics file as well; give another name")
    text = page(make_report(config))
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(config.output), text)
    print(f"wrote {config.output}")


def make_report(config: ReportConfig) -> Report:
    """What the page shows, read from the files of `config`. Raises ValueError for files of another kind."""
    records = read_metrics(config.metrics, lambda note: warn(program_name(), 0, [note]))
    run = job = iterations = None
    if config.checkpoint is not None:
        on_cpus = not by_iteration(records, "mfu")
        run, job, iterations = read_run(config.checkpoint, config.ckpt_step, on_cpus=on_cpus)
    source = config.metrics + (f" and {config.checkpoint}" if config.checkpoint else "")
    return Report(
        title=config.title or Path(config.metrics).name.removesuffix(".jsonl"),
        source=f"from {source}",
        records=records,
        axis=config.x,
        smoothing=config.smoothing,
        iterations=iterations,
        settings=settings_of(run) if run else (),
        memory=memory_rows(job, records) if job else (),
        traffic=traffic_rows(job, records),
    )


def read_run(directory: str, iteration: int | None, *, on_cpus: bool) -> tuple[Config, Job, int]:
    """The settings, the plan and the length of the run that wrote a checkpoint.

    `on_cpus`: it computes in fp32 unless its flags say otherwise.
    """

    def read(path: Location) -> tuple[Config, Mesh, int, Progress]:
        with CheckpointReader(path) as reader:
            progress = Progress.from_json(reader.state["progress"])
            return reader.config(), reader.mesh, reader.state["tokenizer"]["vocab_size"], progress

    found = read_newest(lambda: each_candidate(directory, iteration, "--checkpoint"), read)
    if found is None:
        raise option_error("--checkpoint", directory, "holds no checkpoint; name what --save wrote to")
    config, mesh, vocab_size, progress = found
    schedule = RunSchedule.from_config(
        config.training, config.learning_rate, mesh.data_ranks, seq_length=config.model.seq_length
    )
    precision, planned = config.precision, config
    if on_cpus and not (precision.bf16 or precision.fp16 or precision.fp32):
        planned = dataclasses.replace(config, precision=dataclasses.replace(precision, fp32=True))
    return config, job_of(planned, vocab_size, mesh), schedule.resumed(progress).iterations


def settings_of(config: Config) -> list[Setting]:
    """All settings by part, as flags."""
    settings = []
    for part in dataclasses.fields(config):
        options: Any = getattr(config, part.name)
        given = not_implied(options)
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            settings.append(Setting(part.name, flag_of(field), _shown(value), field.name in given))
    return settings


def memory_rows(job: Job, records: Records) -> list[Comparison]:
    """The planned parts of the memory, and the planned peak beside the measured one."""
    planned = memory_of(job)
    rows = [
        (name, _gib(getattr(planned, part)), "", "") for part, name in PARTS.items() if getattr(planned, part)
    ]
    peaks = by_iteration(records, "memory_peak_bytes").values()
    note = f"planned in {planned.peak_at}"
    if not by_iteration(records, "mfu"):
        note += "; a plan is for GPUs: on a CPU the whole process is measured, with its libraries"
    rows.append(("peak", _gib(planned.peak), _gib(max(peaks)) if peaks else "", note))
    return rows


def traffic_rows(job: Job | None, records: Records) -> list[Comparison]:
    """Bytes of a step between nodes and inside them: planned if the run is known, and of the newest step."""
    sent = ledgers_of(job, total(traffic_of(job))) if job else None
    rows = []
    for name, what in (("inter", "between nodes"), ("intra", "inside nodes")):
        if not (measured := list(by_iteration(records, f"{name}_node_bytes").values())):
            continue
        shown = note = ""
        if sent:
            planned = getattr(sent, name)
            shown = f"{planned:,}"
            note = "equal" if planned == measured[-1] else f"differs by {measured[-1] - planned:+,.0f}"
        rows.append((what, shown, f"{measured[-1]:,.0f}", note))
    return rows


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "not set" if value is None else str(value)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.3f} GiB"
