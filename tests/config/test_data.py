"""Which data flags go together."""

from dataclasses import replace

import pytest

from megatron_zpp.config.data import MASKS, DataConfig, split_shares, weighted_prefixes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mock_data": True, "test_data_path": ("x",)}, r"--mock-data \(given\): .*--test-data-path"),
        ({"data_path": ("0.5", "x", "0.5")}, "--data-path 0.5 x 0.5: must be"),
        ({"data_path": ("0.5",)}, "--data-path 0.5: must be"),
        ({"data_path": ("x", "0.5", "y", "0.5")}, "must be prefixes alone"),
        ({"data_path": ("1", "2", "3", "x")}, "must be prefixes alone"),
        ({"valid_data_path": ("0", "x", "1", "y")}, "--valid-data-path 0 x 1 y: the weight 0 must be"),
        ({"data_path": ("-1", "x")}, "the weight -1 must be a positive, finite number"),
        ({"data_path": ("nan", "x")}, "the weight nan must be"),
        ({"data_path": ("inf", "x")}, "the weight inf must be"),
        (
            {"valid_data_path": ("hf:x",), "train_data_path": ("y",), "dataset_order": "megatron"},
            "--dataset-order megatron: hf:x is text",
        ),
        (
            {"mock_data": True, "dataset_packing": "best-fit"},
            "--dataset-packing best-fit: --mock-data has no",
        ),
        (
            {"data_path": ("x", "y.jsonl"), "dataset_packing": "best-fit"},
            "--dataset-packing best-fit: y.jsonl is text",
        ),
        (
            {"data_path": ("x",), "dataset_packing": "best-fit", "dataset_order": "megatron"},
            "--dataset-packing best-fit: orders samples itself; omit it or --dataset-order megatron",
        ),
        ({"data_path": ("x.jsonl", "hf:y")}, "--data-path x.jsonl hf:y: put a weight before each"),
        ({"data_path": ("x",), "json_key": "body"}, "--json-key body: applies to text, .*omit it"),
        ({"mock_data": True, "skip_bad_lines": True}, r"--skip-bad-lines \(given\): applies to text"),
    ],
)
def test_contradictions_are_refused(settings, message):
    """tests/faults has the others."""
    with pytest.raises(ValueError, match="^.*" + message):
        DataConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"data_path": ("./1", "./2"), "split": "1"},
        {"data_path": ("x.jsonl", "y.jsonl.zst"), "append_eod": True, "data_cache_path": "z"},
        {"data_path": ("0.5", "x.jsonl", "2e-1", "hf:y/z", "0.3", "w"), "json_key": "b", "verify_data": True},
    ],
)
def test_exactly_one_source_of_data_is_accepted(settings):
    config = DataConfig(**settings)
    for name, value in settings.items():
        assert getattr(config, name) == value


def test_packed_documents_are_separated():
    assert DataConfig(data_path=("x",), dataset_packing="best-fit", verify_data=True).masks == MASKS[:2]


def test_default_split_is_megatrons():
    assert DataConfig(data_path=("x",)).shares == (0.969, 0.03, 0.001)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "1,,1", "1,2,3,4", "1/2/3/4", "0,0,0", "-1,2", "+1,2", "nan", "inf,1", "1e3,1", "1_0,1"),
        *(",1,1", "1.2.3", ".", "9" * 400, "train", "80%,train"),
    ],
)
def test_invalid_splits_are_refused(text):
    with pytest.raises(
        ValueError, match=r"^--split .*: must be up to three shares of 0 or more, as in 969,30,1$"
    ):
        split_shares(text)


def test_weights_belong_to_the_prefix_after_them():
    assert weighted_prefixes("--data-path", ("1", "a", "2.5", "b")) == ((1.0, "a"), (2.5, "b"))
    assert weighted_prefixes("--data-path", ("a", "b")) == ((None, "a"), (None, "b"))
    assert weighted_prefixes("--data-path", ()) == ()


def test_a_cache_has_an_effect_where_samples_are_packed() -> None:
    windows = DataConfig(data_path=("x",), data_cache_path="z")
    assert "no effect" in windows.without_effect()[0]
    assert not replace(windows, dataset_packing="best-fit").without_effect()
