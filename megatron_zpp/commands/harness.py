"""EleutherAI's lm-evaluation-harness on a checkpoint: `megatron-zpp lm-eval run …`.

All arguments go to lm_eval's command line; `--model megatron_zpp --model_args load=DIR` selects a checkpoint.
Without `--device` it runs on the first GPU, or on the CPU where there is none.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.generate.continuation import Stop, continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.loading import CheckpointOptions, load_for
from megatron_zpp.generate.scoring import Passage, score_passages

_NEW_TOKENS = 256  # default of tasks that set no number, as in the harness's own models
# Names of the number of new tokens; the first one that is given counts, as in lm_eval's normalize_gen_kwargs.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Settings of transformers that are not available here, and their values without effect on the text.
_NEUTRAL: dict[str, int] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "diversity_penalty", "penalty_alpha", "min_new_tokens"), 0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0),
}


@dataclass(frozen=True)
class Generation:
    """How a task wants texts continued."""

    new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]


def generation_of(settings: Mapping[str, Any]) -> Generation:
    """What a task's generation settings mean. Raises ValueError, in one line, for an unsupported one."""
    left = {name: value for name, value in settings.items() if name != "use_cache"}
    until: str | Sequence[str] = left.pop("until", None) or ()
    temperature = left.pop("temperature", 1.0 if left.get("do_sample") else 0.0)
    if not left.pop("do_sample", True):
        temperature = 0.0
    sampling = Sampling(temperature, left.pop("top_k", None) or 0, left.pop("top_p", None) or 0.0)
    lengths = [left.pop(name, None) for name in _LENGTHS]
    new_tokens = next((int(each) for each in lengths if each is not None), _NEW_TOKENS)
    for name, value in left.items():
        if name not in _NEUTRAL:
            known = ", ".join(("until", "do_sample", "temperature", "top_k", "top_p", *_LENGTHS))
            raise option_error(name, value, f"unsupported generation setting; supported are {known}")
        if value not in (_NEUTRAL[name], None):
            fix = f"not available; run without it by --gen_kwargs {name}={_NEUTRAL[name]}"
            raise option_error(name, value, fix)
    return Generation(new_tokens, sampling, (until,) if isinstance(until, str) else tuple(until))


@register_model("megatron_zpp")
class CheckpointLM(LM):
    """Answers the harness's three kinds of requests with a checkpoint."""

    def __init__(
        self,
        load: str,
        ckpt_step: int | None = None,
        device: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        precision: str | None = None,
    ) -> None:
        """`load` and `ckpt_step` are as in evaluate; lm_eval passes on `device` and `batch_size`.

        `precision` is bf16, fp16 or fp32.
        """
        super().__init__()
        if max_batch_size is not None:
            raise ValueError(
                f"max_batch_size {max_batch_size}: is for --batch_size auto, which is not supported"
            )
        if precision not in (None, "bf16", "fp16", "fp32"):
            raise ValueError(f"precision {precision}: must be bf16, fp16 or fp32")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size {batch_size}: must be a whole number, 1 or more")
        numbers = {precision: True} if precision else {}
        options = CheckpointOptions(load=load, ckpt_step=ckpt_step, **numbers)
        self._place = _place(device or "auto")
        self._batch_size = int(batch_size)
        self._model, self._tokenizer = load_for(options, self._place)
        self._positions = self._model.config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        return self._place

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether greedy decoding gives it.

        An empty context is an end of document; a context that is too long is cut to its last tokens.
        """
        passages = [self._passage(*instance.args) for instance in requests]
        scores = score_passages(self._model, passages, self._batch_size)
        return [(sum(score.log_probabilities), score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: each token once, in windows that begin after an end of document.

        If the tokenizer begins texts with other tokens, the first windows begin with the last of these.
        """
        found = []
        for instance in requests:
            windows = get_rolling_token_windows(
                self._tokenizer.encode(instance.args[0]),
                self._tokenizer.before_text[-1],
                self._positions,
                context_len=1,
            )
            passages = [
                Passage([*before, *scored], len(scored))
                for before, scored in map(make_disjoint_window, windows)
            ]
            scores = score_passages(self._model, passages, self._batch_size)
            found.append(sum(sum(score.log_probabilities) for score in scores))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The model's continuation of each context up to one of the task's stop strings.

        Copies of a request, which the harness makes for a task with `repeats`, get texts of their own.
        """
        groups: dict[Generation, list[int]] = {}  # places of the requests with the same settings
        for place, instance in enumerate(requests):
            groups.setdefault(generation_of(instance.args[1]), []).append(place)
        found = [""] * len(requests)
        for generation, places in groups.items():
            texts = self._continue([requests[place].args[0] for place in places], generation)
            for place, text in zip(places, texts, strict=True):
                found[place] = text
        return found

    def _passage(self, context: str, continuation: str) -> Passage:
        """The tokens to score. Trailing spaces of a context join the continuation: tokens begin with them."""
        kept = context.rstrip()
        first = self._tokenizer.begin if kept else self._tokenizer.before_text
        before = [*first, *self._tokenizer.encode(kept)]
        whole = [*first, *self._tokenizer.encode(context + continuation)]
        scored = len(whole) - len(before)
        if not 0 < scored <= self._positions:
            raise ValueError(f"a continuation has {scored} tokens; the model has {self._positions} positions")
        return Passage(whole[-(self._positions + 1) :], scored)

    def _continue(self, contexts: Sequence[str], generation: Generation) -> list[str]:
        # If both do not fit, the context is cut; if that is not possible, the window slides.
        new_tokens, positions = generation.new_tokens, self._positions
        room = positions - new_tokens if new_tokens < positions else positions
        written = continue_texts(
            self._model,
            self._tokenizer,
            [[*self._tokenizer.begin, *self._tokenizer.encode(context)][-room:] for context in contexts],
            new_tokens=new_tokens,
            sampling=generation.sampling,
            seed=1234,
            stop=Stop(frozenset([self._tokenizer.eod]), generation.stops),
            batch_size=self._batch_size,
        )
        return [text.text for text in written]


def main() -> None:
    """Run lm_eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv[1:] = with_device(sys.argv[1:])
    cli_evaluate()


def with_device(argv: Sequence[str]) -> list[str]:
    """`argv` with a device that this machine has, before the user's arguments, which therefore prevail.

    lm_eval itself fills in cuda:0, also where there is no GPU. A device of a --config file prevails as well.
    """
    arguments = list(argv)
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments.insert(0, "run")  # as lm_eval does where no command is named
    from_file = any(argument.partition("=")[0] in ("-C", "--config") for argument in arguments)
    if arguments[:1] == ["run"] and not from_file:
        arguments[1:1] = ["--device", "cuda:0" if torch.cuda.device_count() else "cpu"]
    return arguments


def _place(device: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` names. Raises ValueError if this machine lacks it."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        raise option_error("--device", device, "must be auto, cpu, cuda or cuda:N")
    place = select_device(kind, Topology())
    if not number:
        return place
    if not number.isdecimal() or int(number) >= torch.cuda.device_count():
        raise option_error("--device", device, f"this machine has {torch.cuda.device_count()} GPUs")
    return torch.device(kind, int(number))
