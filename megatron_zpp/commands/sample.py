"""Prints text from a checkpoint: `megatron-zpp sample --load DIR --prompt TEXT`."""

from dataclasses import dataclass

from megatron_zpp.config.command_line import command_groups
from megatron_zpp.config.options import Options, count, option, option_error
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.generate.continuation import Stop, continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.loading import CheckpointOptions, DeviceOptions, load_for


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Options):
    """sample: prompts and sampling"""

    prompt: tuple[str, ...] = option(("",), "Texts to continue; an empty text begins a document.")
    num_samples: int = count(1, "Texts to draw from each prompt.")
    max_new_tokens: int = count(128, "Tokens of each text, unless it ends first.")
    temperature: float = option(0.8, "Below 1 sharpens the distribution; 0 takes the likeliest.", at_least=0)
    top_k: int = option(50, "Draw from this many most likely tokens; 0: from all.", at_least=0)
    top_p: float = option(
        0.0,
        "Draw among the likeliest tokens (of --top-k) that make up this share of probability; 0: all.",
        at_least=0,
        at_most=1,
    )
    seed: int = option(
        1234, "The same seed and prompt give the same text, whatever else is drawn.", at_least=0, below=2**63
    )
    stop: tuple[str, ...] = option((), "A text ends before any of these; the end of a document ends it too.")
    batch_size: int = count(16, "Texts generated at once.")


def main() -> None:
    """Generate the texts that the command line asks for."""
    groups = {"model": CheckpointOptions, "device": DeviceOptions, "sample": SampleConfig}
    options = command_groups(groups, __doc__)
    config: SampleConfig = options["sample"]
    device = select_device(options["device"].device, Topology())
    model, tokenizer = load_for(options["model"], device)
    prompts = []
    for prompt in config.prompt:
        try:
            prompts.append([*tokenizer.begin, *tokenizer.encode(prompt)])
        except ValueError as error:
            raise option_error("--prompt", prompt, str(error)) from None
    texts = continue_texts(
        model,
        tokenizer,
        [ids for ids in prompts for _ in range(config.num_samples)],
        new_tokens=config.max_new_tokens,
        sampling=Sampling(config.temperature, config.top_k, config.top_p),
        seed=config.seed,
        stop=Stop(frozenset([tokenizer.eod]), config.stop),
        batch_size=config.batch_size,
    )
    for number, text in enumerate(texts):
        print(
            f"--- sample {number + 1} ---\n{config.prompt[number // config.num_samples]}{text.text}",
            flush=True,
        )
