"""Generated tokens per second, compared with transformers: `python benchmarks/generation.py [--texts 1 8]`.

A GPT with random weights continues prompts of random tokens greedily: with the cache of keys and values,
without it (a forward over the whole text per token), and by transformers' generate with the same weights and
its own cache. All run in one process, on the same threads, in fp32 on CPUs and bf16 on GPUs. The time is the
best of --runs; without the cache there is one run.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch

from benchmarks.common import write_result
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import Options, option, parse_options
from megatron_zpp.generate.continuation import continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.text import Stop
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer

VOCABULARY = 50_257
Write = Callable[[], list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """generation benchmark"""

    model_preset: str = option("gpt2-125m", "Shape of the model.")
    texts: tuple[int, ...] = option(
        (1, 8), "Texts that are written at once; one measurement each.", at_least=1
    )
    prompt_tokens: int = option(128, "Tokens of each prompt.", at_least=1)
    new_tokens: int = option(32, "Tokens that are written after each.", at_least=1)
    runs: int = option(5, "Times that each is measured.", at_least=1)


def transformers_model(ours: GPT) -> Any:
    """The same weights in transformers' GPT-2."""
    import transformers

    from tests.generate.models import as_transformers

    transformers.logging.set_verbosity_error()
    positions = ours.config.max_position_embeddings
    weight = ours.embedding.tokens.weight
    return as_transformers(ours, positions).to(weight.device, weight.dtype)


def uncached(model: GPT, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
    """Tokens written with a whole forward per token."""
    ids = prompts
    with torch.inference_mode():
        for _ in range(new_tokens):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[:, prompts.shape[1] :].tolist()


def cached(model: GPT, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
    """Tokens written with the cache, as by sample."""
    texts = continue_texts(
        model,
        NullTokenizer(VOCABULARY - 1),
        prompts.tolist(),
        new_tokens=new_tokens,
        sampling=Sampling(temperature=0),
        seed=0,
        stop=Stop(),
        batch_size=len(prompts),
    )
    return [text.ids for text in texts]


def theirs(model: Any, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
    """Tokens written by transformers' generate."""
    found = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return found[:, prompts.shape[1] :].tolist()


def measure(writers: dict[str, Write], runs: int) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
    """The shortest time of each writer, and what it wrote.

    Writers take turns, because other programs may use the machine too.
    """
    seconds, written = dict.fromkeys(writers, math.inf), {}
    for run in range(runs):
        for name, write in writers.items():
            if run and name == "without_cache":
                continue  # the slowest by far: one run is precise enough
            started = time.perf_counter()
            written[name] = write()  # ids on the CPU: the device has finished
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds, written


def main() -> None:
    settings = parse_options(Settings, "generation.py", __doc__, sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(model_preset=settings.model_preset, init_method_std=0.1)
    model = GPT(config, VOCABULARY).initialize(1).eval().requires_grad_(False)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    reference = transformers_model(model)
    generator = torch.Generator().manual_seed(2)
    rows = []
    for texts in settings.texts:
        prompts = torch.randint(VOCABULARY, (texts, settings.prompt_tokens), generator=generator).to(device)
        writers: dict[str, Write] = {
            "with_cache": partial(cached, model, prompts, settings.new_tokens),
            "without_cache": partial(uncached, model, prompts, settings.new_tokens),
            "transformers": partial(theirs, reference, prompts, settings.new_tokens),
        }
        seconds, written = measure(writers, settings.runs)
        row: dict[str, Any] = {"texts": texts}
        for name in writers:
            row[f"{name}_tokens_per_second"] = round(texts * settings.new_tokens / seconds[name], 1)
        row["texts_that_all_write_alike"] = sum(
            a == b == c for a, b, c in zip(*written.values(), strict=True)
        )
        rows.append(row)
    figures = {
        "model": settings.model_preset,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "dtype": str(model.embedding.tokens.weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "transformers": __import__("transformers").__version__,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "rows": rows,
    }
    write_result("generation", figures)


if __name__ == "__main__":
    run_tool("generation.py", main)
