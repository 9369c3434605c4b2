"""What saves cost: how long training waits; rates of writing and reading relative to the disk's own rates.

    python benchmarks/checkpoint.py --directory DIRECTORY [--preset 345m] [--saves 3]
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py --directory DIRECTORY

Waits: the seconds that the training's thread spends in the saver between steps. The disk's own rates: a file
per rank with the same number of bytes, written in large pieces and made durable, then read after it was
dropped from the page cache; by all ranks at once, in the same run as the saves.
"""

import argparse
import math
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from megatron_zpp.checkpoint.directory import committed
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.root import Config, parse_args
from megatron_zpp.distributed.process_group import barrier, process_group, select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.library import load_operations
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.supervision.process import connect_ranks
from megatron_zpp.train.saving.saver import Saver
from megatron_zpp.zero.engine import ZeroEngine

TOKENIZER: dict[str, Any] = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 50_000,
    "eod": 49_999,
    "fingerprint": "",
}
PIECE = 8 << 20  # bytes


class Listener(Reporter):
    """Prints nothing, and ends the benchmark when a save fails."""

    def __init__(self) -> None:
        """Opens no console and no sinks."""

    def say(self, text: str) -> None:
        """A line that says which checkpoint was saved."""

    def warn(self, text: str) -> None:
        """Raises SystemExit, because a failed save would make the figures worthless."""
        raise SystemExit(text)


def config_of(options: argparse.Namespace, *flags: str) -> Config:
    """The configuration of a run."""
    shape = ["--model-preset", options.preset, "--seq-length", str(options.seq_length)]
    shape += ["--micro-batch-size", str(options.micro_batch_size), "--lr", "1e-4", "--train-iters", "1000"]
    shape += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "49999", "--mock-data", "--bf16"]
    return parse_args([*shape, "--zero-stage", "3", "--save", str(options.directory), *flags])


def build(config: Config, topology: Topology, device: torch.device) -> ZeroEngine:
    """The engine of such a run."""
    with torch.device("meta"):
        model = GPT(config.model, TOKENIZER["vocab_size"])
    operations = None
    if device.type == "cuda":
        operations = load_operations("cuda", require_kernels=True, say=print)
    return ZeroEngine(
        model,
        topology.mesh(),
        EngineConfig(zero=config.zero, optimizer=config.optimizer, precision=config.precision),
        initialize=partial(model.initialize_parameter, seed=1),
        device=device,
        operations=operations,
    )


class Training:
    """Steps on random tokens, which call the saver where a run does."""

    def __init__(self, engine: ZeroEngine, config: Config) -> None:
        self.engine = engine
        shape = (config.training.micro_batch_size, config.model.seq_length + 1)
        self._tokens = torch.randint(49_000, shape)
        self.iteration = 0

    def step(self, saver: Saver | None = None) -> tuple[float, float]:
        """(seconds of the step, seconds inside the saver)."""
        started = time.perf_counter()
        self.engine.accumulate(self._tokens, index=0, micro_batches=1)
        inside = time.perf_counter()
        if saver is not None:
            saver.before_step()
        inside = time.perf_counter() - inside
        self.engine.step(1e-4)
        self._synchronize()
        self.iteration += 1
        after = time.perf_counter()
        if saver is not None:
            saver.after_step()
        now = time.perf_counter()
        return now - started, inside + now - after

    def save(self, saver: Saver) -> float:
        """Seconds that the training waits for a save before the next step begins."""
        started = time.perf_counter()
        saver.save(Progress(self.iteration, self.iteration))
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()


def raw_rates(path: Path, size: int) -> tuple[float, float]:
    """Bytes per second of a plain file of `size` bytes, (written, read)."""
    piece = memoryview(os.urandom(PIECE))
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-size // PIECE)):
            file.write(piece)
        os.fsync(file.fileno())
    written = time.perf_counter() - started
    forget(path)
    target = bytearray(PIECE)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(target):
            pass
    read = time.perf_counter() - started
    path.unlink()
    return size / written, size / read


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_saves(
    training: Training, saver: Saver, path: Path, nbytes: int, count: int
) -> tuple[list[float], list[tuple[float, float]]]:
    """Seconds of synchronous saves, and the disk's own rates just before each save."""
    seconds, rates = [], []
    for _ in range(count):
        barrier(training.engine.topology)
        rates.append(raw_rates(path, nbytes))
        barrier(training.engine.topology)
        seconds.append(training.save(saver))
        training.step(saver)
    return seconds, rates


def time_stalls(training: Training, saver: Saver, steps: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds that training waits for asynchronous saves, and those of the `steps` during each save."""
    stalls, beside = [], []
    for _ in range(count):
        stall = training.save(saver)
        for _ in range(steps):
            seconds, inside = training.step(saver)
            stall += inside
            beside.append(seconds)
        stalls.append(stall)
    saver.finish()
    return stalls, beside


def _newest(directory: Path) -> Path:
    return Path(str(next(iter(committed(directory).values()))))


def time_loads(engine: ZeroEngine, checkpoint: Path, count: int) -> list[float]:
    """Seconds of loads that read from the disk."""
    seconds = []
    for _ in range(count):
        for file in checkpoint.iterdir():
            forget(file)
        barrier(engine.topology)
        started = time.perf_counter()
        load_checkpoint(checkpoint, engine, TOKENIZER, with_optimizer=True)
        barrier(engine.topology)
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(
    options: argparse.Namespace, topology: Topology, device: torch.device, store: dist.Store
) -> dict[str, Any]:
    """All figures, on every rank."""
    config = config_of(options)
    engine = build(config, topology, device)
    training = Training(engine, config)
    for _ in range(3):
        training.step()
    plain = median(training.step()[0] for _ in range(5))
    barrier(topology)
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    shard_bytes = sum(shard.nbytes for kind in kinds for shard in engine.states.shards(kind))
    path = options.directory / f"raw_{topology.rank}"
    options.directory.mkdir(parents=True, exist_ok=True)

    def saver(name: str, *flags: str) -> Saver:
        return Saver(
            engine,
            config_of(options, *flags),
            tokenizer=TOKENIZER,
            tokenizer_files={},
            reporter=Listener(),
            store=dist.PrefixStore(name, store),
            start=Progress(),
        )

    syncs, rates = time_saves(training, saver("waiting"), path, shard_bytes, options.saves)
    sync, step = engine.mean_over_ranks(torch.tensor([median(syncs), plain], device=device)).tolist()
    steps = 2 + math.ceil(2 * sync / step)  # until an asynchronous save is done; equal on all ranks
    stalls, beside = time_stalls(training, saver("behind", "--async-save"), steps, options.saves)
    load = median(time_loads(engine, _newest(options.directory), options.saves))
    written, read = (median(rate[side] for rate in rates) for side in (0, 1))
    return {
        "preset": options.preset,
        "ranks": topology.world_size,
        "bytes_a_rank": shard_bytes,
        "seconds_of_a_step": round(plain, 4),
        "seconds_of_a_save": [round(value, 4) for value in syncs],
        "stall_of_an_async_save": [round(value, 4) for value in stalls],
        "stall_over_save": round(max(stalls) / sync, 4),
        "step_beside_a_save_over_step": round(max(beside) / plain, 3),
        "raw_write_gb_per_second_a_rank": round(written / 1e9, 3),
        "raw_read_gb_per_second_a_rank": round(read / 1e9, 3),
        "save_over_raw_write": round(shard_bytes / sync / written, 3),
        "load_over_raw_read": round(shard_bytes / load / read, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--preset", default="gpt2-125m")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    topology = Topology.from_environment(os.environ)
    distributed = config_of(options).distributed
    device = select_device("auto", topology)
    meeting = connect_ranks(distributed, topology, "checkpoint")
    with process_group(distributed, topology, device, meeting):
        figures = measure(options, topology, device, meeting.store)
        if topology.rank == 0:
            write_result(f"checkpoint_{device.type}_{topology.world_size}", figures, options.output)
            shutil.rmtree(options.directory)
        barrier(topology)


if __name__ == "__main__":
    main()
