"""evaluate's figures against transformers in float64, for any number of ranks; what it refuses."""

import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.commands.evaluate import GROUPS, build_task, report
from megatron_zpp.config.command_line import command_groups
from megatron_zpp.data.corpus.inputs import find_files
from megatron_zpp.generate import loading
from megatron_zpp.generate.scoring import Passage
from megatron_zpp.generate.tasks import Task, last_word
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer
from tests.generate.models import TRAINED, as_transformers, make_checkpoint
from tests.support import Run, nightly, program, wait_until

ARTICLES = [
    f"Article {number}: the fox jumps over the lazy dog, and then sleeps.\n" * 3 for number in range(3)
]
SENTENCES = ["the quick brown fox jumps", "over the lazy dog", "single", "one  two ", "naïve – 東京"]


def jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def evaluate(*argv: object, ranks: int = 1) -> tuple[int, str, str]:
    """The exit status, and what all ranks have said on stdout and stderr."""
    done = program("megatron_zpp.commands.evaluate", *argv, "--device", "cpu", processes=ranks)
    return done.returncode, done.stdout, done.stderr


def figures(directory: Path, *argv: object, ranks: int = 1) -> dict[str, object]:
    output = directory / "new" / f"figures.{ranks}.json"
    status, out, err = evaluate(*argv, "--output", output, ranks=ranks)
    assert status == 0, err
    assert "token_perplexity" in out
    return json.loads(output.read_text())


def nats(model: GPT, ids: list[int], width: int, stride: int) -> list[float]:
    """-log p of each id but the first, each from a separate forward in float64."""
    theirs, found = as_transformers(model).double(), []
    for place in range(1, len(ids)):
        # The last window that begins at a multiple of the stride and was the first to reach this place.
        begin = max(0, -(-(place - width) // stride)) * stride
        with torch.no_grad():
            logits = theirs(torch.tensor([ids[begin:place]])).logits[0, -1]
        found.append(-logits.log_softmax(-1)[ids[place]].item())
    return found


@pytest.mark.parametrize(
    ("checkpoint", "stride"), [nightly("gpt2", None), ("llama", 5)], indirect=["checkpoint"]
)
def test_perplexity_is_the_plain_one_on_any_number_of_ranks(
    checkpoint: Path, loaded: tuple[GPT, Tokenizer], tmp_path: Path, stride: int | None
) -> None:
    """JSON lines, and a file that is one document; three ranks find the same bits as one."""
    model, tokenizer = loaded
    jsonl(tmp_path / "articles.jsonl", ARTICLES[:2])
    (tmp_path / "wiki.test.tokens").write_text(ARTICLES[2])
    flags = ["--load", checkpoint, "--valid-data", tmp_path / "articles.jsonl", tmp_path / "wiki.test.tokens"]
    flags += ["--stride", stride] if stride else []
    found = figures(tmp_path, *flags)
    expected = []
    for text in ARTICLES:
        expected += nats(model, [tokenizer.eod, *tokenizer.encode(text)], TRAINED, stride or TRAINED)
    words, size = sum(len(text.split()) for text in ARTICLES), sum(len(text) for text in ARTICLES)
    assert found["documents"] == 3
    assert found["tokens"] == len(expected)
    assert found["words"] == words
    assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found["token_perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-4)
    assert found["word_perplexity"] == pytest.approx(math.exp(sum(expected) / words), rel=1e-3)
    assert found["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / size, rel=1e-5)
    if stride:
        assert figures(tmp_path, *flags, ranks=3) == found


def test_lambada_is_what_greedy_generation_says(
    checkpoint: Path, loaded: tuple[GPT, Tokenizer], tmp_path: Path
) -> None:
    """A last word counts when transformers' model, after the words before it, writes exactly its tokens."""
    model, tokenizer = loaded
    theirs = as_transformers(model)
    # Half of the lines get the last word that the model itself would write, where that is text.
    texts = list(SENTENCES)
    for text in SENTENCES[:2]:
        ids = tokenizer.encode(text)
        passage = last_word(tokenizer, "x", text, TRAINED)
        context = list(passage.ids[: len(passage.ids) - passage.scored])
        written = theirs.generate(torch.tensor([context]), max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert ids[: len(context)] == context
        texts.append(tokenizer.decode(written[0].tolist()))
    right = 0
    for text in texts:
        passage = last_word(tokenizer, "x", text, TRAINED)
        context, word = passage.ids[: -passage.scored], list(passage.ids[-passage.scored :])
        written = theirs.generate(
            torch.tensor([list(context)]), max_new_tokens=len(word), do_sample=False, pad_token_id=0
        )
        right += written[0, len(context) :].tolist() == word
    flags = ["--task", "lambada", "--load", checkpoint, "--valid-data", jsonl(tmp_path / "l.jsonl", texts)]
    found = figures(tmp_path, *flags)
    assert (found["documents"], found["right"]) == (len(texts), right)
    assert found["accuracy"] == right / len(texts)
    assert figures(tmp_path, *flags, ranks=2) == found


def test_last_words(loaded: tuple[GPT, Tokenizer]) -> None:
    tokenizer = loaded[1]
    for text in SENTENCES:
        passage = last_word(tokenizer, "x", text, width=TRAINED)
        whole = [*passage.ids]
        assert tokenizer.decode([id for id in whole if id != tokenizer.eod]) == text.strip()
        word = tokenizer.decode(whole[len(whole) - passage.scored :])
        assert word.strip() == text.split()[-1]
        assert 0 < passage.scored < len(whole)
    long = last_word(tokenizer, "x", "ab " * 90 + "end", width=10)
    assert len(long.ids) == 11
    with pytest.raises(ValueError, match="its last word"):
        last_word(tokenizer, "x", "a " + "z!" * 90, width=10)


LAMBADA = "--task lambada"
REFUSED = [
    ("", "gone", None, "--valid-data {path}: no such file, and no file matches; check the path"),
    ("", "a.jsonl", "", "--valid-data {path}: is empty; give a file with text"),
    ("", "a.txt", " \n", "--valid-data {path}: is empty; give a file with text"),
    (LAMBADA, "a.jsonl", '{"text": "a b"}\n{"text": " "}', "{path}: has a text without a word; omit it"),
    ("", "a.jsonl", '{"text": "x"}\n7\n', "{path} line 2: malformed line: not a JSON object but a number"),
    (LAMBADA, "a.txt", "a b", "--valid-data {path}: LAMBADA is JSON lines: its name must end in .jsonl"),
    (f"{LAMBADA} --stride 4", "a.jsonl", "{}", "--stride 4: has no meaning with --task lambada"),
    ("--stride 0", "a.txt", "a", "--stride 0: must be at least 1"),
    ("--stride 25", "a.txt", "a", "--stride 25: must be at most --seq-length 24; else tokens are skipped"),
    ("--seq-length 33", "a.txt", "a", "--seq-length 33: must be at most the model's 32"),
    ("--bf16 --fp32", "a.txt", "a", "--fp32 (given): contradicts --bf16; give one"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "name", "content", "said"), REFUSED, ids=str)
def test_invalid_settings_are_refused(
    loaded: tuple[GPT, Tokenizer], tmp_path: Path, flags: str, name: str, content: str | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)

    def prepare() -> None:
        config = command_groups(GROUPS, "", ["--load", "x", "--valid-data", str(path), *flags.split()])
        build_task(config["evaluation"], find_files("--valid-data", config["evaluation"].valid_data), *loaded)

    with pytest.raises(ValueError, match=re.escape(said.format(path=path))):
        prepare()


@pytest.mark.parametrize("command", ["evaluate --load x --valid-data", "report"])
def test_what_is_read_is_not_overwritten(tmp_path: Path, command: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text('{"iteration": 1, "lm_loss": 2.5}\n')
    name, *flags = command.split()
    done = program(f"megatron_zpp.commands.{name}", *flags, str(file), "--output", str(file))
    assert (done.returncode, file.read_text()) == (1, '{"iteration": 1, "lm_loss": 2.5}\n')
    assert "as well; give another" in done.stderr


@pytest.mark.parametrize(("nats", "loss", "printed"), [(math.nan, None, "nan"), (2000.0, 1000.0, "inf")])
def test_figures_that_are_not_finite_are_null_in_the_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    nats: float,
    loss: float | None,
    printed: str,
) -> None:
    """Of weights that are NaN, or of a text that the model finds impossible. JSON has no Infinity."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    task = Task("perplexity", [Passage([0, 1, 2], 2)], documents=1, words=1, characters_utf8=3)
    argv = ["--load", "x", "--valid-data", "x", "--output", str(tmp_path / "figures.json")]
    config = command_groups(GROUPS, "", argv)["evaluation"]
    report(task.figures([(-nats, 0)]), config, torch.device("cpu"), torch.float32)
    found = json.loads((tmp_path / "figures.json").read_text(), parse_constant=refuse)
    assert (found["loss"], found["token_perplexity"]) == (loss, None)
    assert found["tokens"] == 2
    assert f"token_perplexity: {printed}\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the iterations 1 and 2."""
    return make_checkpoint(tmp_path_factory.mktemp("twice"), "gpt2", "--save-interval", "1")


def read_then_say(directory: Path) -> None:
    """On rank 0: what it has read is still there when it has read it."""
    read = loading._read_model

    def patched(path: Path) -> Any:
        found = read(path)
        (directory / "rank 0 has read").touch()
        return found

    loading._read_model = patched


def rotate_first(directory: Path) -> None:
    """On rank 1: before the first read, a run saves iteration 2 and removes iteration 1."""
    read = loading._read_model

    def patched(path: Path) -> Any:
        if (directory / "saved later").exists():
            wait_until((directory / "rank 0 has read").exists)
            (directory / "saved later").rename(directory / "iter_0000002")
            (directory / "iter_0000001").rename(directory / "iter_0000001.partial")
        return read(path)

    loading._read_model = patched


def test_all_ranks_read_the_same_checkpoint_beside_a_run_that_rotates(
    saved_twice: Path, tmp_path: Path
) -> None:
    """The tokenizer is that of the checkpoint: the file that the run read may be gone."""
    data = jsonl(tmp_path / "a.jsonl", ARTICLES)
    expected = figures(tmp_path, "--load", saved_twice, "--valid-data", data)
    (saved_twice.parent / "tokenizer.json").unlink()
    older = figures(tmp_path, "--load", saved_twice, "--ckpt-step", 1, "--valid-data", data)
    assert expected["loss"] != older["loss"]
    rotated = tmp_path / "rotated"
    shutil.copytree(saved_twice, rotated)
    (rotated / "iter_0000002").rename(rotated / "saved later")
    argv = ["--load", rotated, "--valid-data", data, "--device", "cpu", "--output", tmp_path / "out.json"]
    with Run(tmp_path, 2, "megatron_zpp.commands.evaluate") as run:
        for rank, change in enumerate((read_then_say, rotate_first)):
            run.start(rank, *map(str, argv), change=partial(change, rotated))
        assert set(run.statuses().values()) == {0}, run.errors()
    assert json.loads((tmp_path / "out.json").read_text()) == expected


def test_ranks_with_other_text_of_the_same_name_are_refused(saved_twice: Path, tmp_path: Path) -> None:
    argv = ["--load", str(saved_twice), "--valid-data", "a.jsonl", "--device", "cpu"]
    with Run(tmp_path, 2, "megatron_zpp.commands.evaluate") as run:
        for rank in range(2):
            (node := tmp_path / f"node{rank}").mkdir()
            jsonl(node / "a.jsonl", ARTICLES[rank:])
            run.start(rank, *argv, change=partial(os.chdir, node))
        assert set(run.statuses().values()) == {1}
        (line,) = run.errors()
        assert "--valid-data.bytes differs between ranks: rank 1 and rank 0 have different values" in line


def test_ranks_say_once_that_there_is_no_checkpoint_or_a_damaged_one(
    saved_twice: Path, tmp_path: Path
) -> None:
    """One that is there is not looked up again."""
    damaged = tmp_path / "damaged"
    shutil.copytree(saved_twice, damaged)
    (damaged / "iter_0000002/state.json").write_text("{}")
    data = jsonl(tmp_path / "a.jsonl", ARTICLES)
    for place, said in (
        (tmp_path, "holds no checkpoint; name what"),
        (damaged, "choose another one with --ckpt-step"),
    ):
        status, _, err = evaluate("--load", place, "--valid-data", data, ranks=2)
        assert (status, err.count(said)) == (1, 1)
