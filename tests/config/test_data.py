"""Which data flags go together."""

import math

import pytest

from megatron_zpp.config.data import DataConfig, split_shares, weighted_prefixes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"--data-path \(not given\): a run needs data: --data-path PREFIX, or .*--mock-data"),
        ({"mock_data": True, "data_path": ("x",)}, r"--mock-data \(given\): .*--data-path"),
        ({"mock_data": True, "test_data_path": ("x",)}, r"--mock-data \(given\): .*--test-data-path"),
        (
            {"data_path": ("x",), "valid_data_path": ("y",)},
            r"--valid-data-path \(given\): --data-path is divided",
        ),
        (
            {"train_data_path": ("x",), "split": "1,0,0"},
            "--split 1,0,0: divides --data-path only; .*--train-data-path",
        ),
        ({"data_path": ("x",), "split": "a,b"}, "--split a,b: must be up to three shares"),
        ({"data_path": ("x",), "num_workers": -1}, "--num-workers -1: must be at least 0"),
        (
            {"data_path": ("0.5", "x", "y")},
            "--data-path 0.5 x y: must be prefixes alone, or a weight before each",
        ),
        ({"data_path": ("0.5", "x", "0.5")}, "--data-path 0.5 x 0.5: must be"),
        ({"data_path": ("0.5",)}, "--data-path 0.5: must be"),
        ({"data_path": ("x", "0.5", "y", "0.5")}, "must be prefixes alone"),
        ({"data_path": ("1", "2", "3", "x")}, "must be prefixes alone"),
        ({"valid_data_path": ("0", "x", "1", "y")}, "--valid-data-path 0 x 1 y: the weight 0 must be"),
        ({"data_path": ("-1", "x")}, "the weight -1 must be a positive, finite number"),
        ({"data_path": ("nan", "x")}, "the weight nan must be"),
        ({"data_path": ("inf", "x")}, "the weight inf must be"),
        (
            {"data_path": ("x.jsonl",), "dataset_order": "megatron"},
            "--dataset-order megatron: x.jsonl is text, .*preprocess_data.py",
        ),
        (
            {"valid_data_path": ("hf:x",), "train_data_path": ("y",), "dataset_order": "megatron"},
            "--dataset-order megatron: hf:x is text",
        ),
        ({"data_path": ("x.json.gz",), "verify_data": True}, r"--verify-data \(given\): text has no .bin"),
        ({"data_path": ("x.jsonl", "y")}, "--data-path x.jsonl y: put a weight before each"),
        ({"data_path": ("x.jsonl", "hf:y")}, "--data-path x.jsonl hf:y: put a weight before each"),
        ({"data_path": ("x",), "json_key": "body"}, "--json-key body: applies to text, .*omit it"),
        ({"data_path": ("x",), "append_eod": True}, r"--append-eod \(given\): applies to text"),
        ({"mock_data": True, "skip_bad_lines": True}, r"--skip-bad-lines \(given\): applies to text"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match="^.*" + message):
        DataConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"data_path": ("x",)},
        {"data_path": ("x", "y", "z"), "split": "1"},
        {"data_path": ("0.3", "x", "7e-1", "y")},
        {"data_path": ("./1", "./2")},
        {"data_path": ("x.jsonl", "y.jsonl.zst"), "append_eod": True, "data_cache_path": "z"},
        {
            "data_path": ("0.5", "x.jsonl", "0.2", "hf:y/z", "0.3", "w"),
            "json_key": "body",
            "verify_data": True,
        },
        {"train_data_path": ("x",)},
        {"mock_data": True, "num_workers": 0},
    ],
)
def test_exactly_one_source_of_data_is_accepted(settings):
    config = DataConfig(**settings)
    for name, value in settings.items():
        assert getattr(config, name) == value


def test_default_split_is_megatrons():
    assert DataConfig(data_path=("x",)).shares == (0.969, 0.03, 0.001)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "1,,1", "1,2,3,4", "1/2/3/4", "0,0,0", "-1,2", "+1,2", "nan", "inf,1", "1e3,1", "1_0,1"),
        *("1.2.3", ".", "9" * 400, "train", "80%,train"),
    ],
)
def test_invalid_splits_are_refused(text):
    with pytest.raises(
        ValueError, match=r"^--split .*: must be up to three shares of 0 or more, as in 969,30,1$"
    ):
        split_shares(text)


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("1", (1, 0, 0)),
        ("8,1,1", (0.8, 0.1, 0.1)),
        ("0,3", (0, 1, 0)),
        (" 98 , 2 , 0 ", (0.98, 0.02, 0)),
        ("'99,1,0'", (0.99, 0.01, 0)),
        ("949/50/1", (0.949, 0.05, 0.001)),
        ("98 2 0", (0.98, 0.02, 0)),
        ("[.9, .1]", (0.9, 0.1, 0)),
    ],
)
def test_shares_are_those_of_megatron(text, shares):
    theirs = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    assert theirs.parse_and_normalize_split(text) == pytest.approx(shares)
    assert all(math.isclose(a, b) for a, b in zip(split_shares(text), shares, strict=True))


def test_weights_belong_to_the_prefix_after_them():
    assert weighted_prefixes("--data-path", ("1", "a", "2.5", "b")) == ((1.0, "a"), (2.5, "b"))
    assert weighted_prefixes("--data-path", ("a", "b")) == ((None, "a"), (None, "b"))
    assert weighted_prefixes("--data-path", ()) == ()
