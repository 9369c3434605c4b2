"""The adapter for lm-evaluation-harness beside the harness's own for transformers, with the same weights."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from megatron_zpp.generate import continuation
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer
from tests.generate.models import POSITIONS
from tests.support import run

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness: pip install --no-deps -r tests/requirements-interop.txt"
)

pytest.importorskip("accelerate", reason="what the harness's own model for transformers needs")

PAIRS = [
    ("The quick brown", " fox"),
    ("The quick brown ", "fox jumps"),
    ("", "a"),
    ("one two three " * 9, " four five"),
]
TASK = """
task: local_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def ours(checkpoint: Path) -> object:
    from megatron_zpp.commands.harness import CheckpointLM

    return CheckpointLM(load=str(checkpoint), device="cpu", batch_size=3)


@pytest.fixture
def reference(checkpoint: Path, theirs: "transformers.PreTrainedModel") -> object:
    from lm_eval.models.huggingface import HFLM

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint.parent / "tokenizer.json"),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    return HFLM(pretrained=theirs, tokenizer=tokenizer, device="cpu", batch_size=3, max_length=POSITIONS)


def ask(model: object, kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    instances = [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]
    return getattr(model, kind)(instances, disable_tqdm=True)


def test_loglikelihoods(ours: object, reference: object) -> None:
    for mine, other in zip(
        ask(ours, "loglikelihood", PAIRS), ask(reference, "loglikelihood", PAIRS), strict=True
    ):
        assert mine[0] == pytest.approx(other[0], rel=1e-4)
        assert mine[1] == other[1]


def test_a_hugging_face_model_is_scored_as_it_is(
    ours: object, checkpoint: Path, theirs: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    from megatron_zpp.commands.harness import CheckpointLM

    theirs.save_pretrained(tmp_path)
    shutil.copyfile(checkpoint.parent / "tokenizer.json", tmp_path / "tokenizer.json")
    direct = CheckpointLM(load=f"hf:{tmp_path}", device="cpu", batch_size=3)
    assert ask(direct, "loglikelihood", PAIRS) == ask(ours, "loglikelihood", PAIRS)


def test_texts_of_a_published_model_begin_as_in_transformers(
    checkpoint: Path, theirs: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    """Contexts of scores and prompts, and documents whose perplexity is asked for, begin with `<bos>`."""
    from lm_eval.models.huggingface import HFLM

    from megatron_zpp.checkpoint.huggingface.importing import read_whole
    from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
    from megatron_zpp.commands.harness import CheckpointLM
    from megatron_zpp.generate.tasks import perplexity_task

    theirs.save_pretrained(tmp_path)
    parts = json.loads((checkpoint.parent / "tokenizer.json").read_text())
    bos = next(token for token, index in parts["model"]["vocab"].items() if index == 5)
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    sequences = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    parts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, sequences[0]],
        "pair": [special, *sequences],
        "special_tokens": {bos: {"id": bos, "ids": [5], "tokens": [bos]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": bos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    auto.pad_token = auto.eos_token
    direct = CheckpointLM(load=f"hf:{tmp_path}", device="cpu", batch_size=3)
    other = HFLM(pretrained=theirs, tokenizer=auto, device="cpu", batch_size=3, max_length=POSITIONS)
    pairs = [pair for pair in PAIRS if pair[0]]
    for mine, expected in zip(
        ask(direct, "loglikelihood", pairs), ask(other, "loglikelihood", pairs), strict=True
    ):
        assert mine[0] == pytest.approx(expected[0], rel=1e-4)
    greedy = {"max_gen_toks": 8, "do_sample": False, "until": ["zzz"]}
    contexts = [("The quick brown fox", greedy), ("one two three " * 9, greedy)]
    assert ask(direct, "generate_until", contexts) == ask(other, "generate_until", contexts)
    _, tokenizer = read_whole(NamedDirectory("x", "x", tmp_path))
    (tmp_path / "text").write_text("The quick brown fox")
    files = [str(tmp_path / "text")]
    (passage,) = perplexity_task(files, "text", tokenizer, width=POSITIONS, stride=POSITIONS).passages
    assert passage.ids == auto("The quick brown fox").input_ids
    assert passage.scored == len(passage.ids) - 1


def test_rolling_loglikelihoods(ours: object, reference: object) -> None:
    texts = [("The quick brown fox. " * 12,), ("short",)]
    kind = "loglikelihood_rolling"
    assert ask(ours, kind, texts) == pytest.approx(ask(reference, kind, texts), rel=1e-4)


def test_generation(ours: object, reference: object, model: GPT, tokenizer: Tokenizer) -> None:
    settings = {"max_gen_toks": 8, "do_sample": False, "until": ["zzz"]}
    contexts = [("The quick brown fox", settings), ("one two three " * 9, settings)]
    mine, other = (ask(each, "generate_until", contexts) for each in (ours, reference))
    assert mine == other
    stop = {**settings, "until": [mine[0][2:4]]}
    assert ask(ours, "generate_until", [(contexts[0][0], stop)]) == [mine[0].split(mine[0][2:4])[0]]


@pytest.mark.parametrize("checkpoint", ["gpt2"], indirect=True)
def test_copies_of_a_sampled_request_differ_and_answers_keep_their_order(
    ours: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task with `repeats` hands over the same request several times. `--batch_size` is obeyed."""
    sizes, write = [], continuation.write_batch

    def recorded(model: GPT, texts: list[continuation.Continuation], sampling: Sampling) -> None:
        sizes.append(len(texts))
        write(model, texts, sampling)

    monkeypatch.setattr(continuation, "write_batch", recorded)
    greedy = {"max_gen_toks": 8, "do_sample": False}
    sampled = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "top_p": 0.95}
    words = ["The quick brown fox", "jumps over", "a"]
    alone = [ask(ours, "generate_until", [(word, greedy)])[0] for word in words]
    mixed = [(words[0], greedy), ("a", sampled), (words[1], greedy), ("a", sampled), (words[2], greedy)]
    found = ask(ours, "generate_until", [*mixed, ("a", sampled), ("a", sampled), (words[0], greedy)])
    assert [found[place] for place in (0, 2, 4, 7)] == [*alone, alone[0]]
    copies = [found[place] for place in (1, 3, 5, 6)]
    assert len(set(copies)) > 1
    assert copies == ask(ours, "generate_until", [("a", sampled)] * 4)  # the same in every evaluation
    assert max(sizes) == 3


@pytest.mark.parametrize("checkpoint", ["gpt2"], indirect=True)
def test_settings_of_published_tasks(ours: object, reference: object) -> None:
    """Other names of the number of tokens, and values that change nothing, as transformers takes them."""
    for settings in (
        {"max_new_tokens": 5, "num_beams": 1, "until": "zzz"},
        {"max_tokens": 5, "repetition_penalty": 1.0, "temperature": 0, "until": ["zzz"]},
        {"max_completion_tokens": 5, "do_sample": False, "until": ["zzz"]},
        {"max_gen_toks": 5, "max_new_tokens": 9, "until": ["zzz"]},
    ):
        mine, other = (ask(each, "generate_until", [("jumps", settings)]) for each in (ours, reference))
        assert mine == other, settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"num_beams": 10},
            "num_beams 10: not available; run without it by --gen_kwargs num_beams=1",
        ),
        (
            {"max_length": 9},
            "max_length 9: unsupported generation setting; supported are until, do_sample, temperature, "
            "top_k, top_p, max_gen_toks, max_new_tokens, max_tokens, max_completion_tokens",
        ),
    ],
    ids=str,
)
def test_a_setting_that_would_change_the_text_is_refused(settings: dict, said: str) -> None:
    from megatron_zpp.commands.harness import generation_of

    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        generation_of(settings)


@pytest.mark.nightly
@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_task_from_the_command_line(checkpoint: Path, tmp_path: Path, reference: object) -> None:
    lines = [
        {"context": f"{word} and", "choices": [" fox", " dog", " return"], "right": right}
        for right, word in enumerate(("The quick", "over", "main(self)"))
    ]
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "local_words.yaml").write_text(TASK.format(data=data))
    done = run(
        *("-m", "megatron_zpp", "lm-eval", "run", "--model", "megatron_zpp"),
        *("--model_args", f"load={checkpoint}", "--tasks", "local_words", "--include_path", tmp_path),
        *("--output_path", tmp_path / "results.json"),
        timeout=240,
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
        HF_HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    (found,) = tmp_path.rglob("results*.json")
    accuracy = json.loads(found.read_text())["results"]["local_words"]["acc,none"]
    right = []
    for line in lines:
        pairs = [(line["context"], choice) for choice in line["choices"]]
        values = [value for value, _ in ask(reference, "loglikelihood", pairs)]
        right.append(values.index(max(values)) == line["right"])
    assert accuracy == pytest.approx(sum(right) / len(right))


def test_a_device_is_named_where_the_user_names_none() -> None:
    """lm_eval fills in cuda:0, which a machine without GPUs refuses."""
    from megatron_zpp.commands.harness import with_device

    device = "cuda:0" if torch.cuda.device_count() else "cpu"
    assert with_device(["run", "--tasks", "x"]) == ["run", "--device", device, "--tasks", "x"]
    assert with_device(["--tasks", "x"]) == ["run", "--device", device, "--tasks", "x"]
    assert with_device(["run", "--device", "cuda:1"])[-2:] == ["--device", "cuda:1"]  # the last one counts
    for others in (["ls", "tasks"], ["--help"], [], ["run", "--config", "file.yaml"]):
        assert with_device(others) == others


@pytest.mark.parametrize("checkpoint", ["gpt2"], indirect=True)
def test_a_device_that_the_machine_lacks_is_refused_in_a_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_zpp.commands.harness import CheckpointLM

    cuda = "--device cuda: torch sees no GPU here; use --device cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, said in (
        ("cuda", cuda),
        ("mps", "--device mps: must be auto, cpu, cuda or cuda:N"),
        ("cpu:3", "--device cpu:3: this machine has 0 GPUs"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            CheckpointLM(load=str(checkpoint), device=device)
