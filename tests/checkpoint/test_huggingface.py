"""Checkpoints to and from Hugging Face's format, against transformers itself."""

import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.huggingface import compare
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.commands.huggingface import main
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.generate.loading import load_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.train_sentencepiece import train_sentencepiece
from tests.faults.site import train_bpe
from tests.model.test_gpt import names_in_transformers
from tests.support import pretrain
from tests.tokenizer.test_tokenizers import ORDINARY

SOURCE = inspect.getsource(inspect)
SHAPE = {"n_positions": 19, "n_embd": 20, "n_layer": 2, "n_head": 4}  # no size that anything is padded to
SHAPE_FLAGS = (
    "--num-layers 2 --hidden-size 20 --num-attention-heads 4 --seq-length 19 --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --micro-batch-size 2 --eval-iters 1 --num-workers 0"
).split()


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`python -m megatron_zpp.checkpoint.huggingface` with some arguments, and what it prints."""

    def run(*argv: object) -> str:
        monkeypatch.setattr(sys, "argv", ["huggingface", *map(str, argv)])
        capsys.readouterr()
        main()
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with vocab.json, merges.txt and tokenizer.json of one byte-level BPE."""
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe(directory, [*ORDINARY, SOURCE])
    return directory


def entries(bpe: Path) -> int:
    return len(json.loads((bpe / "vocab.json").read_text()))


def theirs(bpe: Path, **settings: object) -> transformers.GPT2LMHeadModel:
    """A GPT-2 in which no parameter is zero or one, with as many entries as the tokenizer."""
    torch.manual_seed(7)
    defaults = {"vocab_size": entries(bpe), "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**defaults | SHAPE | settings)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def save(model: nn.Module, bpe: Path, directory: Path, **how: object) -> Path:
    model.save_pretrained(directory, **how)
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        shutil.copyfile(bpe / name, directory / name)
    return directory


def tensors(directory: Path) -> dict[str, Tensor]:
    """All of a directory, from one file or more."""
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@torch.no_grad()
def logits(directory: Path, tokens: Tensor) -> Tensor:
    return transformers.GPT2LMHeadModel.from_pretrained(directory).eval()(tokens).logits


@pytest.mark.parametrize(
    ("settings", "sharded"),
    [
        ({}, False),
        ({"tie_word_embeddings": False, "n_inner": 50, "layer_norm_epsilon": 1e-3, "resid_pdrop": 0.0}, True),
    ],
    ids=["tied", "untied, in several files"],
)
def test_import_and_export_change_no_bit(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, settings: dict[str, object], sharded: bool
) -> None:
    model = theirs(bpe, **settings)
    source = save(model, bpe, tmp_path / "theirs", **({"max_shard_size": "9KB"} if sharded else {}))
    assert (source / "model.safetensors.index.json").exists() == sharded
    said = tool("import", source, tmp_path / "ours")
    assert "logits: largest difference from transformers'" in said
    tool("export", tmp_path / "ours", tmp_path / "back", *(["--max-file-gib", "1e-5"] if sharded else []))
    assert (tmp_path / "back/model.safetensors.index.json").exists() == sharded
    check_equal(tensors(tmp_path / "back"), tensors(source))

    tokens = torch.randint(entries(bpe), (2, 19))
    assert torch.equal(logits(tmp_path / "back", tokens), model(tokens).logits)
    ours, _ = load_model(str(tmp_path / "ours"), None)
    assert torch.allclose(ours(tokens), model(tokens).logits, atol=1e-5, rtol=1e-5)
    before, after = (
        transformers.GPT2Config.from_pretrained(path).to_dict() for path in (source, tmp_path / "back")
    )
    for key in (*SHAPE, "layer_norm_epsilon", "tie_word_embeddings", "activation_function", "resid_pdrop"):
        assert before[key] == after[key], key
    assert (before["n_inner"] or 80) == (after["n_inner"] or 80)


def test_old_files_of_the_bare_model(tool: Callable[..., str], bpe: Path, tmp_path: Path) -> None:
    """As openai's gpt2 was saved: no prefix, and the causal masks beside the weights; in half precision."""
    model = theirs(bpe).bfloat16().float()
    source = save(model.transformer.bfloat16(), bpe, tmp_path / "theirs")
    masks = {f"h.{index}.attn.bias": torch.ones(1, 1, 19, 19) for index in range(2)}
    save_file(load_file(source / "model.safetensors") | masks, source / "model.safetensors", {"format": "pt"})
    tool("import", source, tmp_path / "ours", "--make-vocab-size-divisible-by", "7")
    tokens = torch.randint(entries(bpe), (2, 19))
    ours, _ = load_model(str(tmp_path / "ours"), None)
    assert torch.allclose(ours(tokens), model.float()(tokens).logits, atol=1e-5, rtol=1e-5)


def tokenizer_flags(bpe: Path, kind: str, directory: Path) -> list[str]:
    if kind == "GPT2BPETokenizer":
        files = ["--vocab-file", str(bpe / "vocab.json"), "--merge-file", str(bpe / "merges.txt")]
    elif kind == "HuggingFaceTokenizer":
        files = ["--tokenizer-model", str(bpe)]
    elif kind == "SentencePieceTokenizer":
        (directory / "t.model").write_bytes(train_sentencepiece([*ORDINARY * 3, SOURCE], 500, "bpe"))
        files = ["--tokenizer-model", str(directory / "t.model")]
    else:
        files = ["--vocab-size", "100"]
    return ["--tokenizer-type", kind, *files]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("GPT2BPETokenizer", 0),
        ("HuggingFaceTokenizer", 3),
        ("SentencePieceTokenizer", 3),
        ("NullTokenizer", 0),
    ],
)
def test_a_run_is_exported(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, kind: str, stage: int
) -> None:
    """Of two ranks: its weights are in the files, and AutoTokenizer gives its ids."""
    flags = [*SHAPE_FLAGS, *tokenizer_flags(bpe, kind, tmp_path), "--zero-stage", str(stage)]
    ran = pretrain(*flags, "--train-iters", "2", "--lr", "1e-2", "--save", str(tmp_path / "run"), processes=2)
    assert ran.returncode == 0, ran.stderr
    said = tool("export", tmp_path / "run", tmp_path / "out")
    model, tokenizer = load_model(str(tmp_path / "run"), None)
    exported = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()
    for name, parameter in model.named_parameters():
        theirs, transposed = names_in_transformers(2)[name]
        expected = parameter.T if transposed else parameter
        found = exported[theirs]
        assert torch.equal(found, expected[: len(found)]), name
        assert len(found) == (tokenizer.vocab_size if theirs == "transformer.wte.weight" else len(expected))
    tokens = torch.randint(tokenizer.vocab_size, (2, 19))
    assert torch.allclose(model(tokens), logits(tmp_path / "out", tokens), atol=1e-5, rtol=1e-5)
    if kind == "NullTokenizer":
        assert "no tokenizer is written" in said
        assert not (tmp_path / "out/tokenizer.json").exists()
        return
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert auto.eos_token_id == tokenizer.eod
    assert len(auto) == tokenizer.vocab_size
    for text in [*ORDINARY, SOURCE]:
        ids = auto.encode(text, add_special_tokens=False)
        assert ids == tokenizer.encode(text)
        assert auto(text)["input_ids"] == ids
        assert auto.decode(ids) == text
    assert auto.encode(auto.eos_token, add_special_tokens=False) == [tokenizer.eod]


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 2)])
def test_a_run_starts_from_their_weights(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, stage: int, world: int
) -> None:
    """A step too small to change a weight leaves what was loaded; an imported checkpoint starts alike."""
    model = theirs(bpe)
    source = save(model, bpe, tmp_path / "theirs", max_shard_size="9KB")
    tool("import", source, tmp_path / "ours")
    flags = [*SHAPE_FLAGS, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(source)]
    flags += ["--zero-stage", str(stage), "--train-iters", "1", "--lr", "1e-30", "--weight-decay", "0"]
    out = []
    for load in (f"hf:{source}", str(tmp_path / "ours")):
        saved = tmp_path / f"run{len(out)}"
        ran = pretrain(*flags, "--load", load, "--save", str(saved), processes=world)
        assert ran.returncode == 0, ran.stderr
        out.append(ran.stdout)
        tool("export", saved, tmp_path / f"back{len(out)}")
        check_equal(tensors(tmp_path / f"back{len(out)}"), tensors(source))
    assert f" loaded the weights of hf:{source}; starting at iteration 0" in out[0]
    assert "resuming at iteration 0, 0 samples" in out[1]
    first, second = (
        [line for line in text.splitlines() if "valid loss at iteration 0" in line] for text in out
    )
    assert first == second != []


def test_an_imported_run_is_started_again(tool: Callable[..., str], bpe: Path, tmp_path: Path) -> None:
    """--save equal to --load, as the launchers ask for: from the import, then with the optimizer's state."""
    source = save(theirs(bpe), bpe, tmp_path / "theirs")
    flags = [*SHAPE_FLAGS, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(source)]
    flags += ["--lr", "1e-3", "--lr-decay-style", "constant"]
    weights = []
    for name, lengths in (("whole", [4]), ("parts", [2, 4])):
        tool("import", source, tmp_path / name)
        for length in lengths:
            named = ["--save", str(tmp_path / name), "--load", str(tmp_path / name)]
            ran = pretrain(*flags, *named, "--train-iters", str(length))
            assert ran.returncode == 0, ran.stderr
        with CheckpointReader(candidates(str(tmp_path / name))[0]) as reader:
            assert reader.state["with_optimizer"]
            weights.append(reader.parameters())
    check_equal(*weights)


def test_without_transformers_weights_are_read_back(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(theirs(bpe), bpe, tmp_path / "theirs")
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    for action, start, end in (
        ("import", source, tmp_path / "ours"),
        ("export", tmp_path / "ours", tmp_path / "back"),
    ):
        said = tool(action, start, end)
        assert "logits are not compared" in said
        assert "pip install transformers" in said
    check_equal(tensors(tmp_path / "back"), tensors(source))


@pytest.fixture(scope="module")
def good(bpe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs(bpe), bpe, tmp_path_factory.mktemp("good") / "gpt2")


def configured(**settings: object) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return harm


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        there = load_file(directory / "model.safetensors")
        change(there)
        save_file(there, directory / "model.safetensors", {"format": "pt"})

    return harm


def moved(to: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "model.safetensors").rename(directory / to)


def indexed(weight_map: object) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        moved("a.safetensors")(directory)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return harm


REFUSALS = [
    (configured(model_type="llama"), 'model_type is "llama"; only gpt2'),
    (
        configured(activation_function="relu"),
        'activation_function "relu" is not supported; must be "gelu_new"',
    ),
    (
        configured(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx true is not supported",
    ),
    (configured(reorder_and_upcast_attn=True), "reorder_and_upcast_attn true is not supported"),
    (configured(scale_attn_weights=False), "scale_attn_weights false is not supported"),
    (configured(add_cross_attention=True), "add_cross_attention true is not supported"),
    (configured(n_head=3), "must divide --hidden-size 20"),
    (configured(n_layer=3), "has no tensor h.2."),
    (configured(n_layer=1), "its tensor h.1."),
    (configured(n_inner=40), "mlp.c_fc.weight has shape (20, 80); config.json asks for (20, 40)"),
    (configured(n_positions=20), "wpe.weight has shape (19, 20); config.json asks for (20, 20)"),
    (configured(n_layer="2"), 'n_layer is "2"; must be a whole number'),
    (configured(layer_norm_epsilon=None), "layer_norm_epsilon is null; must be a number"),
    (configured(tie_word_embeddings=1), "tie_word_embeddings is 1; must be true or false"),
    (configured(tie_word_embeddings=False), "has no tensor lm_head.weight"),
    (configured(vocab_size=50), "has vocab_size 50, but this HuggingFaceTokenizer has"),
    (weights(lambda there: there.update(score=torch.ones(2))), "its tensor score is no part of a GPT-2"),
    (weights(lambda there: there.pop("transformer.ln_f.bias")), "has no tensor ln_f.bias"),
    (
        weights(lambda there: there.update({"transformer.ln_f.bias": torch.ones(20, dtype=torch.float64)})),
        "ln_f.bias is F64; must be one of F32",
    ),
    (
        weights(lambda there: there.update({"lm_head.weight": 2 * there["transformer.wte.weight"]})),
        "lm_head.weight is not wte.weight",
    ),
    (moved("pytorch_model.bin"), "its weights are pickled (.bin)"),
    (moved("weights.safetensors"), "holds neither model.safetensors nor"),
    (indexed({"x": "gone.safetensors"}), "gone.safetensors: missing"),
    (indexed({"x": "a.safetensors"}), "a.safetensors has no tensor x"),
    (indexed({"x": "../a.safetensors"}), "x is in no file beside it"),
    (indexed({"x": "a\0"}), "x is in no file beside it"),
    (indexed(7), "has no weight_map"),
    (
        lambda directory: (directory / "model.safetensors").write_bytes(b"\0" * 99),
        "not a whole safetensors file",
    ),
    (lambda directory: (directory / "config.json").write_text("{"), "not JSON"),
    (lambda directory: (directory / "config.json").unlink(), "config.json: cannot be read (No such file"),
]


@pytest.mark.parametrize(("harm", "said"), REFUSALS, ids=[said for _, said in REFUSALS])
def test_what_is_no_such_gpt2_is_refused(
    tool: Callable[..., str], good: Path, tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    """In one line that names the directory, and nothing is left."""
    source = tmp_path / "gpt2"
    shutil.copytree(good, source)
    harm(source)
    with pytest.raises(ValueError, match=f"^HF_DIR {source}") as caught:
        tool("import", source, tmp_path / "new")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


def test_a_wrong_conversion_is_found(bpe: Path, good: Path) -> None:
    """Queries and keys changed places: all shapes fit."""
    with torch.device("meta"):
        model = GPT(
            ModelConfig(num_layers=2, hidden_size=20, num_attention_heads=4, seq_length=19), entries(bpe)
        )
    named = NamedDirectory("HF_DIR", str(good), good)
    with HuggingFaceWeights(named, model.config, entries(bpe)) as opened:
        model.load_state_dict(opened.parameters(), assign=True)
    assert "largest difference" in compare.compare_logits(named, good, model)
    with torch.no_grad():
        weight = model.layers[1].attention.qkv.weight
        weight.copy_(torch.cat([weight[20:40], weight[:20], weight[40:]]))
    with pytest.raises(ValueError, match="so this conversion is wrong"):
        compare.compare_logits(named, good, model)


def test_what_a_pipeline_puts_around_a_text_is_not_exported(
    tool: Callable[..., str], bpe: Path, good: Path, tmp_path: Path
) -> None:
    """Nor truncation: a run has trained without either."""
    from tokenizers import Tokenizer, processors

    pipeline = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    end = pipeline.token_to_id("<|endoftext|>")
    pipeline.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", None, [("<|endoftext|>", end)]
    )
    pipeline.enable_truncation(3)
    plain = pipeline.encode(ORDINARY[0], add_special_tokens=False)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "tokenizer.json"]
    tool("import", good, tmp_path / "ours", *flags)
    tool("export", tmp_path / "ours", tmp_path / "out")
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pipeline.no_truncation()
    assert auto(ORDINARY[0])["input_ids"] == pipeline.encode(ORDINARY[0], add_special_tokens=False).ids
    assert len(plain.ids) == 3


def test_a_tokenizer_that_cannot_be_the_same_is_refused(
    tool: Callable[..., str], tmp_path: Path, bpe: Path
) -> None:
    """A unigram model has ways of one score to write a run of spaces; the libraries choose differently."""
    model = train_sentencepiece([SOURCE], 500, "unigram")
    (tmp_path / "t.model").write_bytes(model)
    source = save(theirs(bpe, vocab_size=500), bpe, tmp_path / "theirs")
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "t.model"]
    tool("import", source, tmp_path / "ours", *flags)
    with pytest.raises(
        ValueError, match=r"cannot be written for transformers: near .* ids differ; --no-tok"
    ) as no:
        tool("export", tmp_path / "ours", tmp_path / "out")
    assert "\n" not in str(no.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "t.model", "theirs"]
    (tmp_path / "out").mkdir()  # an empty one may be there
    tool("export", tmp_path / "ours", tmp_path / "out", "--no-tokenizer")
    check_equal(tensors(tmp_path / "out"), tensors(source))
    assert not (tmp_path / "out/tokenizer.json").exists()

    (tmp_path / "t.model").write_bytes(train_sentencepiece([SOURCE], 500, "bpe"))
    with pytest.raises(ValueError, match="trained with another tokenizer than its files hold now"):
        tool("export", tmp_path / "ours", tmp_path / "again")


def test_heads_of_another_width_are_refused(tool: Callable[..., str], tmp_path: Path) -> None:
    flags = [*SHAPE_FLAGS, "--tokenizer-type", "NullTokenizer", "--vocab-size", "50", "--kv-channels", "6"]
    ran = pretrain(*flags, "--train-iters", "1", "--lr", "1e-3", "--save", str(tmp_path / "run"))
    assert ran.returncode == 0, ran.stderr
    with pytest.raises(ValueError, match="its heads are 6 wide"):
        tool("export", tmp_path / "run", tmp_path / "out")
