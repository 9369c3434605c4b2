"""The model of a checkpoint, whole on one device, and the tokenizer that it was trained with."""

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_zpp.checkpoint.directory import (
    LOOKUPS,
    each_candidate,
    lost_newest,
    named_checkpoint,
    read_newest,
    removed_too_often,
)
from megatron_zpp.checkpoint.imported import parameter_shapes, whole_model
from megatron_zpp.checkpoint.manifest import marker_of
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.tokenizer import trained_tokenizer
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import REQUIRED, Options, option, option_error
from megatron_zpp.config.run import HUGGINGFACE
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.location import Location, location
from megatron_zpp.tokenizer.base import Tokenizer

_REMOVED = "removed"  # in place of a rank's problem


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """model: which checkpoint, and its number format"""

    load: str = option(
        REQUIRED,
        "Directory of checkpoints; hf:DIR or hf:ORG/NAME[@REVISION]: a Hugging Face model, in a directory or "
        "on the hub.",
    )
    ckpt_step: int | None = option(None, "This iteration instead of the latest.", at_least=0)
    bf16: bool = option(False, "Compute in bfloat16; the default on GPUs.")
    fp16: bool = option(False, "Compute in float16.")
    fp32: bool = option(False, "Compute in float32; the default on CPUs.")

    def check(self) -> None:
        """Refuse more than one format, and an iteration of a model that has none."""
        self.dtype(torch.device("cpu"))
        if self.ckpt_step is not None and self.is_huggingface:
            raise self.error("ckpt_step", f"--load {self.load} has no iterations; omit it")

    @property
    def is_huggingface(self) -> bool:
        """Whether --load names a Hugging Face model."""
        return self.load.startswith(HUGGINGFACE)

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the requested dtype, or the device's default."""
        precision = PrecisionConfig(bf16=self.bf16, fp16=self.fp16, fp32=self.fp32)
        return getattr(torch, precision.compute_dtype(device.type))


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """device: of a program of one process"""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: a GPU when there is one.")


def load_for(options: CheckpointOptions, device: torch.device) -> tuple[GPT, Tokenizer]:
    """The model on its device and in its number format. Raises ValueError that names --load."""
    if options.is_huggingface:
        model, tokenizer = _read_huggingface(options.load)
    else:
        model, tokenizer = load_model(options.load, options.ckpt_step)
    return model.to(device, options.dtype(device)), tokenizer


def load_together(
    options: CheckpointOptions, device: torch.device, exchange: Exchange
) -> tuple[GPT, Tokenizer]:
    """`load_for` on every rank, all of the checkpoint that rank 0 finds. Every rank must call it.

    If that checkpoint is removed or replaced before all ranks have read it, as by a run with --keep-last, all
    look again. Raises the same ValueError on every rank, which names --load, and one after LOOKUPS such
    times.
    """
    for number in range(LOOKUPS):
        if exchange.topology.rank == 0:
            exchange.put(f"found/{number}", _found(options))
        found = exchange.get(f"found/{number}")
        if found["problem"]:
            raise ValueError(found["problem"])
        loaded, problem, caught = None, None, None
        path = None if options.is_huggingface else named_checkpoint(location(options.load), found["name"])
        try:
            loaded = _read_huggingface(found["name"]) if path is None else _read_model(path)
        except Exception as error:
            problem, caught = one_line(_explained(options.load, error)), error
        if path is not None and (found["marker"] is None or marker_of(path) != found["marker"]):
            problem = _REMOVED
        problems = exchange.all_gather(f"problems/{number}", problem)
        if _REMOVED in problems:
            continue
        if problem := next(filter(None, problems), None):
            raise ValueError(problem) from caught
        assert loaded is not None
        return loaded[0].to(device, options.dtype(device)), loaded[1]
    raise removed_too_often(named_checkpoint(location(options.load), found["name"]))


def _found(options: CheckpointOptions) -> dict[str, str | None]:
    """The name and the marker of the checkpoint to load, or the problem, for the other ranks."""
    try:
        if options.is_huggingface:
            from megatron_zpp.checkpoint.huggingface.named_directory import named_directory

            return {"name": named_directory("--load", options.load).shown, "problem": None}
        path = _newest(options.load, options.ckpt_step)
        return {"name": path.name, "marker": marker_of(path), "problem": None}
    except (ValueError, OSError) as error:
        return {"problem": one_line(error)}


def _read_huggingface(name: str) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of hf:DIR or hf:ORG/NAME."""
    from megatron_zpp.checkpoint.huggingface.importing import read_whole
    from megatron_zpp.checkpoint.huggingface.named_directory import named_directory

    return read_whole(named_directory("--load", name))


def load_model(directory: str, iteration: int | None) -> tuple[GPT, Tokenizer]:
    """The model of a checkpoint on the CPU in fp32, and the tokenizer that it was trained with."""
    try:
        found = read_newest(lambda: [_newest(directory, iteration)], _read_model)
    except DamagedFile as damage:
        raise _explained(directory, damage) from None
    assert found is not None  # `_newest` finds one, or raises
    return found


def _newest(directory: str, iteration: int | None) -> Location:
    """The checkpoint to load. Raises ValueError that names --load, and warns if a newer one is lost."""
    checkpoint = next(each_candidate(directory, iteration), None)
    if checkpoint is None:
        raise option_error("--load", directory, "holds no checkpoint; name what a run's --save wrote to")
    if iteration is None and (lost := lost_newest(location(directory))):
        sys.stderr.write(f"warning: {lost}: skipped; {checkpoint} is loaded instead\n")
    return checkpoint


def _explained(directory: str, error: Exception) -> Exception:
    """`error`, with the remedy if it is damage."""
    if isinstance(error, DamagedFile):
        return option_error("--load", directory, f"{error}; choose another one with --ckpt-step")
    return error


def _read_model(checkpoint: Location) -> tuple[GPT, Tokenizer]:
    with CheckpointReader(checkpoint) as reader:
        config = reader.config()
        tokenizer, _ = trained_tokenizer(reader)
        reader.check_model(parameter_shapes(config.model, tokenizer.vocab_size))
        model = whole_model(config.model, tokenizer.vocab_size, reader.parameters())
    return model.eval().requires_grad_(False), tokenizer
