"""Prints text from a checkpoint: `python -m megatron_zpp.train.sample --load DIR --prompt TEXT`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import REQUIRED, Options, option, parse_options, refusal
from megatron_zpp.config.root import Config
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.build import build_tokenizer

PROG = "sample"


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Options):
    """sample: text from a checkpoint"""

    load: str = option(REQUIRED, "Directory of checkpoints.")
    ckpt_step: int | None = option(None, "This iteration instead of the latest.", at_least=1)
    prompt: str = option("", "Text to go on from; empty begins a document.")
    num_samples: int = option(1, "Texts to draw.", at_least=1)
    max_new_tokens: int = option(128, "Tokens of each text, unless it ends first.", at_least=1)
    temperature: float = option(0.8, "Below 1 sharpens the distribution; 0 takes the likeliest.", at_least=0)
    top_k: int = option(50, "Draw among so many likeliest tokens; 0 among all.", at_least=0)
    seed: int = option(1234, "Same seed, same text.", at_least=0, below=2**63)


def main() -> None:
    """Draws what the command line asks for."""
    config = parse_options(SampleConfig, PROG, __doc__, sys.argv[1:])
    model, tokenizer = load_model(config.load, config.ckpt_step)
    generator = torch.Generator().manual_seed(config.seed)
    try:
        prompt = tokenizer.encode(config.prompt)
    except ValueError as error:
        raise refusal("--prompt", config.prompt, str(error)) from None
    for number in range(config.num_samples):
        ids = generate(
            model,
            prompt or [tokenizer.eod],
            stop=tokenizer.eod,
            new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            generator=generator,
        )
        print(f"--- sample {number + 1} ---\n{config.prompt}{tokenizer.decode(ids)}")


def load_model(directory: str, iteration: int | None) -> tuple[GPT, Tokenizer]:
    """The model of a checkpoint on the CPU in fp32, and the tokenizer that it was trained with."""
    checkpoint = next(iter(candidates(directory, iteration)), None)
    if checkpoint is None:
        raise refusal("--load", directory, "holds no checkpoint; name what pretrain_gpt.py --save wrote to")
    try:
        return _read_model(checkpoint)
    except DamagedFile as damage:
        raise refusal("--load", directory, f"{damage}; choose another one with --ckpt-step") from None


def _read_model(checkpoint: Path) -> tuple[GPT, Tokenizer]:
    with CheckpointReader(checkpoint) as reader:
        try:
            config = Config.from_json(reader.state["config"])
        except ValueError as error:
            raise DamagedFile(f"{checkpoint / STATE}: {error}") from None
        tokenizer = build_tokenizer(config.tokenizer)
        with torch.device("meta"):
            model = GPT(config.model, tokenizer.vocab_size)
        _check_shapes(checkpoint, model, reader.units)
        model.load_state_dict(reader.parameters(), assign=True)
    return model.eval(), tokenizer


def _check_shapes(checkpoint: Path, model: GPT, units: list[dict[str, Any]]) -> None:
    saved = {name: entry["shape"] for unit in units for name, entry in unit["parameters"].items()}
    if saved != {name: list(value.shape) for name, value in model.state_dict().items()}:
        raise DamagedFile(f"{checkpoint / STATE}: its weights are not those of the model that it describes")


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: list[int],
    *,
    stop: int,
    new_tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> list[int]:
    """Ids drawn after `prompt`, up to `new_tokens` or the id `stop`; sees the last positions that fit."""
    ids = list(prompt)
    for _ in range(new_tokens):
        window = torch.tensor([ids[-model.config.max_position_embeddings :]])  # (1, T)
        chosen = _draw(model(window)[0, -1].float(), temperature, top_k, generator)
        if chosen == stop:
            break
        ids.append(chosen)
    return ids[len(prompt) :]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id from logits (V)."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        smallest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


if __name__ == "__main__":
    run_tool(PROG, main)
