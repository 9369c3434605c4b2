"""Blends with text that change when a run resumes: how a text is recognised."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.data.open import seed_of
from megatron_zpp.data.resume import ResumedData, resume_data
from tests.data.format_by_hand import write_by_hand
from tests.data.text.conftest import json_lines, open_run

EOD, SEED = 60_000, 1
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=EOD)


def resumed(saved: ResumedData | None, consumed: int, *paths: str, **settings: object) -> ResumedData:
    """Read `paths` like a run that resumes from the checkpoint of another run."""
    data = DataConfig(train_data_path=paths, num_workers=0, append_eod=True, **settings)
    splits = open_run(data, TOKENIZER)
    kept = saved and DatasetProgress.from_json(json.loads(json.dumps(asdict(saved.dataset_progress))))
    seed = seed_of("train", SEED)
    return resume_data(splits.train, kept, consumed=consumed, data=data, train_seed=seed)


@pytest.fixture
def tokens(documents: list[list[int]], tmp_path: Path) -> str:
    """A tokenised data set of the same documents, 30,000 higher."""
    write_by_hand(tmp_path / "tokens", [[30_000 + token for token in ids] + [EOD] for ids in documents])
    return str(tmp_path / "tokens")


def test_text_that_was_moved_or_compressed_continues(text: str, tokens: str, tmp_path: Path) -> None:
    """With another modification time, and no cached tokens at the new place."""
    first = resumed(None, 0, "0.5", text, "0.5", tokens)
    (tmp_path / "moved").mkdir()
    content = Path(text).read_bytes()
    (tmp_path / "moved" / "other.jsonl").write_bytes(content)
    (tmp_path / "moved" / "text.jsonl.gz").write_bytes(gzip.compress(content))
    numbers = np.arange(100, 300)
    for name in ("other.jsonl", "text.jsonl.gz"):
        path = str(tmp_path / "moved" / name)
        on = resumed(first, 100, "0.5", path, "0.5", tokens)
        assert on.lines == []
        assert np.array_equal(on.samples.batch(numbers), first.samples.batch(numbers))
        on = resumed(first, 100, "1", path)
        assert on.lines == [
            " the blend changes at sample 100; each data set continues from where it was:",
            f"   50.00% -> 100.00% {path}, from its sample 50 on",
            f"   50.00% -> 0 {tokens}, omitted after 50 samples",
        ]


@pytest.mark.parametrize("place", [-1, None])
def test_text_that_was_changed_starts_at_its_beginning(
    documents: list[list[int]], text: str, tokens: str, place: int | None
) -> None:
    """At either end, or anywhere if the length has changed."""
    first = resumed(None, 0, "0.5", text, "0.5", tokens)
    if place is None:
        documents = [*documents[:250], [7], *documents[250:]]
    else:
        documents = [ids[::-1] if ids is documents[place] else ids for ids in documents]
    Path(text).write_bytes(json_lines(documents))
    on = resumed(first, 100, "0.5", text, "0.5", tokens)
    assert on.lines[1:] == [
        f"   0.00% -> 50.00% {text}, from its beginning, because its contents have changed",
        f"   50.00% -> 50.00% {tokens}, from its sample 50 on",
        f"   50.00% -> 0 {text}, omitted after 50 samples",
    ]
    assert [part.stream for part in on.dataset_progress.sets] == [2, 1, 0]
