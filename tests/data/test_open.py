"""Opening data: each source opens, and unusable data gives an error that names it."""

from functools import partial

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.data.provenance import write_provenance
from tests.data.conftest import open_data
from tests.support import refusal

OURS = {"tokenizer_type": "NullTokenizer", "vocab_size": 1000, "eod": 999, "fingerprint": "a"}


open_all = partial(open_data, needed=("train", "valid", "test"))


def tokens_of(samples):
    return set(samples.batch(np.arange(200)).ravel().tolist())


def test_split_cuts_one_data_set(text):
    splits = open_all(DataConfig(data_path=(text,), split="80,15,5"))
    assert tokens_of(splits.train) == set(range(80))
    assert tokens_of(splits.valid) == set(range(80, 95))
    assert tokens_of(splits.test) == set(range(95, 100))
    assert (splits.train.windows_per_epoch, splits.test.windows_per_epoch) == (100, 6)
    assert splits.train.describe() == f"{text}: 800 tokens, 100 samples of 8"


def test_an_evaluation_of_one_epoch_reads_each_window_once(by_hand):
    """With each rounding of windows per data set, and in any order of batches."""
    sizes = (81, 17, 300, 9)
    paths = tuple(by_hand(f"{k}", [list(range(300 * k, 300 * k + size))]) for k, size in enumerate(sizes))
    valid = open_all(DataConfig(valid_data_path=paths), vocab_size=1200, needed=("valid",)).valid
    count = valid.windows_per_epoch
    assert count == sum(size // 8 for size in sizes)
    read = np.concatenate([valid.batch(np.arange(n, min(n + 7, count)))[:, :-1] for n in range(0, count, 7)])
    assert np.unique(read).size == read.size
    assert [each.times for each in valid.epochs(count)] == [1.0] * len(sizes)
    assert [each.times for each in valid.epochs(11)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("flag", ["data_path", "valid_data_path"])
def test_an_evaluation_of_one_epoch_contradicts_weights(text, by_hand, flag):
    other = by_hand("other", [[500] * 30])
    config = DataConfig(**{flag: ("0.3", text, "0.7", other)}, split="0,1" if flag == "data_path" else None)
    error = refusal(open_all, config, needed=("valid",))
    shown = "--" + flag.replace("_", "-")
    assert error.startswith(f"--full-validation (given): {shown} has weights, and ")
    assert "use --eval-iters, or" in error
    alone = DataConfig(valid_data_path=("0.3", text))
    assert open_all(alone, needed=("valid",)).valid.windows_per_epoch == 125


def test_per_split_paths_are_read_whole(text, by_hand):
    other = by_hand("other", [[500] * 30])
    config = DataConfig(train_data_path=(text,), valid_data_path=(other,), test_data_path=("/no/such",))
    splits = open_all(config, needed=("train", "valid"))
    assert tokens_of(splits.train) == set(range(100))
    assert tokens_of(splits.valid) == {500}
    assert splits.test is None  # and not opened


def test_blends_are_in_proportion_to_weights_or_tokens(by_hand):
    a, b = by_hand("a", [[1] * 300]), by_hand("b", [[2] * 100])
    for paths, share in (((a, b), 300), (("0.2", a, "0.8", b), 80)):
        train = open_all(DataConfig(train_data_path=paths), needed=("train",)).train
        assert (train.batch(np.arange(400))[:, 0] == 1).sum() == share


def test_seed_splits_and_members_of_a_blend_have_their_own_order(text):
    def first_tokens(samples):
        return samples.batch(np.arange(100))[:, 0].tolist()

    config = DataConfig(train_data_path=(text,), valid_data_path=(text,))
    one, two = open_all(config, needed=("train", "valid")), open_all(config, needed=("train", "valid"))
    other = open_all(config, seed=2, needed=("train", "valid"))
    assert first_tokens(one.train) == first_tokens(two.train)
    assert first_tokens(one.train) != first_tokens(one.valid)
    assert first_tokens(one.train) != first_tokens(other.train)
    twice = open_all(DataConfig(train_data_path=("1", text, "1", text)), needed=("train",)).train
    assert first_tokens(twice.sources[0]) != first_tokens(twice.sources[1])


def test_needed_split_without_a_share_or_a_path(text):
    one, said = DataConfig(data_path=(text,), split="1,0,0", dataset_order="megatron"), []
    message = refusal(open_all, one, needed=("train", "valid"), requested={"train": 4}, say=said.append)
    assert message == "--split 1,0,0: this run needs valid data, or --eval-iters 0"
    assert not said  # before the order of train is built
    message = refusal(open_all, DataConfig(valid_data_path=(text,)))
    assert message == "--train-data-path (not given): this run needs train data"


def test_too_few_tokens_are_counted(text, by_hand):
    message = refusal(open_all, DataConfig(data_path=(text,), split="80,15,5"), seq_length=50)
    assert message.startswith("--seq-length 50: one sample needs 51 tokens, but the test split of ")
    assert f"{text} has 50 (5 of 100 sequences)" in message
    message = refusal(
        open_all, DataConfig(train_data_path=(by_hand("one", [[3]]),)), seq_length=1, needed=("train",)
    )
    assert "one sample needs 2 tokens" in message
    assert "has 1 (1 of 1 sequences)" in message
    open_all(DataConfig(data_path=(text,), split="80,15,5"), seq_length=49)


def test_default_split_of_a_small_data_set_names_what_is_empty(by_hand):
    message = refusal(
        open_all, DataConfig(data_path=(by_hand("x", [[1] * 100] * 10),)), needed=("train", "valid")
    )
    assert message.startswith("--split 969,30,1 (the default): the valid split of ")
    assert message.endswith("x has 0 of its 10 documents; give --split 90,10,0, or more documents")
    message = refusal(open_all, DataConfig(data_path=(by_hand("y", [[1] * 100]),)), needed=("train", "valid"))
    assert message.endswith("y has 0 of its 1 document; give more documents")


def test_other_tokenizer_and_tokens_outside_the_vocabulary_are_found_at_open(text):
    assert "is 9" in refusal(
        open_all, DataConfig(train_data_path=(text,)), vocab_size=90, seq_length=500, needed=("train",)
    )
    train = open_all(DataConfig(train_data_path=(text,)), seed=46, vocab_size=80, needed=("train",)).train
    with pytest.raises(ValueError, match="is 88, outside the vocabulary of 80"):
        train.batch(np.arange(9))  # the first 8 were read at open
    write_provenance(text, OURS | {"fingerprint": "b"})
    assert "made with another tokenizer" in refusal(
        open_all, DataConfig(data_path=(text,)), tokenizer_description=OURS
    )
    write_provenance(text, OURS)
    open_all(DataConfig(data_path=(text,), split="1,1,1"), tokenizer_description=OURS)


def test_a_damaged_file_of_a_blend_is_named(text, tmp_path):
    assert f"{tmp_path}/none.idx does not exist" in refusal(
        open_all, DataConfig(data_path=(text, str(tmp_path / "none")))
    )
