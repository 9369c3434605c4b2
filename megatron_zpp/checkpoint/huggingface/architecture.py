"""config.json of a GPT-2 and the model settings: what means the same is mapped, all else is refused."""

from dataclasses import dataclass
from typing import Any

from megatron_zpp.checkpoint.huggingface.named_directory import CONFIG, NamedDirectory
from megatron_zpp.config.json_file import read_json_object, shown
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import option_error

_DEFAULTS: dict[str, Any] = {  # of transformers' GPT2Config, for keys that are left out
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "tie_word_embeddings": True,
}
_OTHER_NAMES = {  # that transformers takes as well
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")
_NUMBERS = ("layer_norm_epsilon", "initializer_range", "attn_pdrop", "resid_pdrop", "embd_pdrop")
# Keys that would change the result: the values that our model computes, the default first.
_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Architecture:
    """A model as its config.json describes it; `notes` are lines for the person who imports it."""

    model: ModelConfig
    vocab_size: int
    notes: tuple[str, ...] = ()


def read_architecture(named: NamedDirectory, divisible_by: int = 128) -> Architecture:
    """What config.json says. Raises ValueError, in one line, for what is no GPT-2 as ours."""
    if not named.path.is_dir():
        raise named.error(f"is no directory; name one that holds {CONFIG} and model.safetensors")
    values = read_json_object(named.flag, str(named.path / CONFIG))
    if values.get("model_type") != "gpt2":
        found = shown(values.get("model_type"))
        raise named.error(f"{CONFIG}: model_type is {found}; only gpt2 is supported")
    for key, supported in _ONLY.items():
        value = values.get(key, supported[0])
        if not any(value == one and type(value) is type(one) for one in supported):
            raise named.error(
                f"{CONFIG}: {key} {shown(value)} is not supported; must be {shown(supported[0])}"
            )
    their = {key: values.get(key, default) for key, default in _DEFAULTS.items()}
    their |= {name: values[other] for other, name in _OTHER_NAMES.items() if other in values}
    _check_types(named, their)
    hidden = their["n_embd"]
    try:
        model = ModelConfig(
            num_layers=their["n_layer"],
            hidden_size=hidden,
            num_attention_heads=their["n_head"],
            seq_length=their["n_positions"],
            ffn_hidden_size=their["n_inner"],
            make_vocab_size_divisible_by=divisible_by,
            norm_epsilon=float(their["layer_norm_epsilon"]),
            untie_embeddings_and_output_weights=not their["tie_word_embeddings"],
            init_method_std=float(their["initializer_range"]),
            attention_dropout=float(their["attn_pdrop"]),
            hidden_dropout=float(their["resid_pdrop"]),
        )
    except ValueError as error:
        raise named.error(f"{CONFIG}: {error}") from None
    notes: tuple[str, ...] = ()
    if their["embd_pdrop"] != their["resid_pdrop"]:
        notes = (
            f"embd_pdrop {their['embd_pdrop']} is not resid_pdrop {their['resid_pdrop']}; "
            "--hidden-dropout is both",
        )
    return Architecture(model, their["vocab_size"], notes)


def _check_types(named: NamedDirectory, their: dict[str, Any]) -> None:
    for key in _SIZES:
        value = their[key]
        if not (type(value) is int and 0 < value <= _LARGEST) and not (key == "n_inner" and value is None):
            raise named.error(f"{CONFIG}: {key} is {shown(value)}; must be a whole number from 1 on")
    for key in _NUMBERS:
        if type(their[key]) not in (int, float):
            raise named.error(f"{CONFIG}: {key} is {shown(their[key])}; must be a number")
    if type(their["tie_word_embeddings"]) is not bool:
        found = shown(their["tie_word_embeddings"])
        raise named.error(f"{CONFIG}: tie_word_embeddings is {found}; must be true or false")


def check_vocabulary(named: NamedDirectory, architecture: Architecture, tokenizer: dict[str, Any]) -> None:
    """Raises ValueError unless the tokenizer that `tokenizer` describes has as many ids as the model."""
    if tokenizer["vocab_size"] != architecture.vocab_size:
        raise named.error(
            f"has vocab_size {architecture.vocab_size}, but this {tokenizer['tokenizer_type']} has "
            f"{tokenizer['vocab_size']} entries; give the tokenizer of that model"
        )


def check_flags(named: NamedDirectory, theirs: ModelConfig, flags: ModelConfig) -> None:
    """Raises ValueError that names the first model flag which does not fit the directory's model."""
    told = {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "kv_channels": "n_embd / n_head",
        "ffn_hidden_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
    }
    for name, key in told.items():
        given, needed = getattr(flags, name), getattr(theirs, name)
        if given != needed:
            flag = "--" + name.replace("_", "-")
            fix = f"the model of {named.flag} {named.shown} has {key} {needed}; give {flag} {needed}"
            raise option_error(flag, given, fix)
    untied = theirs.untie_embeddings_and_output_weights
    if flags.untie_embeddings_and_output_weights != untied:
        given, does, fix = (
            ("(not given)", "does not tie", "give it") if untied else ("(given)", "ties", "omit it")
        )
        raise option_error(
            "--untie-embeddings-and-output-weights",
            given,
            f"the model of {named.flag} {named.shown} {does} them; {fix}",
        )


def config_json(named: NamedDirectory, model: ModelConfig, vocab_size: int, eod: int) -> dict[str, Any]:
    """The contents of config.json. Raises ValueError for a model that GPT2LMHeadModel cannot be."""
    if model.kv_channels * model.num_attention_heads != model.hidden_size:
        raise named.error(
            f"its heads are {model.kv_channels} wide (--kv-channels); transformers' GPT-2 has only "
            f"--hidden-size {model.hidden_size} / --num-attention-heads {model.num_attention_heads}"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "torch_dtype": "float32",
    }
