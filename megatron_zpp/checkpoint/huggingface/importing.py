"""Makes a checkpoint of iteration 0 from a directory of Hugging Face's."""

from pathlib import Path

from megatron_zpp.checkpoint.huggingface.architecture import fit_vocabulary, read_architecture
from megatron_zpp.checkpoint.huggingface.compare import LEFT_OUT, compare_logits, have_transformers
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory, check_empty
from megatron_zpp.checkpoint.huggingface.tokenizer_files import find_tokenizer
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.checkpoint.imported import write_imported
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer


def import_checkpoint(
    named: NamedDirectory, target: Path, flags: TokenizerConfig | None, divisible_by: int
) -> list[str]:
    """Write `target`/iter_0000000, and return lines that say so; `flags` name another tokenizer.

    All weights are held in memory, twice if transformers is installed, for the comparison.
    """
    architecture = read_architecture(named, divisible_by)
    settings = flags or find_tokenizer(named)
    tokenizer = build_tokenizer(settings)
    model = fit_vocabulary(named, architecture, describe(tokenizer))
    check_empty("CHECKPOINT_DIR", target)
    with HuggingFaceWeights(named, model, tokenizer.vocab_size) as weights:
        compared = LEFT_OUT
        if have_transformers():
            whole = GPT(model, tokenizer.vocab_size)
            whole.load_state_dict(weights.parameters(), assign=True)
            compared = compare_logits(named, named.path, whole)
            del whole
        path, flags_of_run = write_imported(target, model, weights, settings, tokenizer)
    return [*architecture.notes, f"{path}: {flags_of_run}", compared]
