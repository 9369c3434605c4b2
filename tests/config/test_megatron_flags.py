"""Every flag of Megatron-LM's parser has a row and the fate that the row says; its own scripts run."""

import pytest

from megatron_zpp.config.legacy.megatron_features import FEATURES
from megatron_zpp.config.legacy.megatron_flags import IDLE_TODAY, ONLY_TODAY, REFUSED_TODAY, RENAMED_TODAY
from megatron_zpp.config.legacy.old_flags import OLD_FLAGS
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args, parse_command_line
from tests.config.command_line import MINIMAL
from tests.config.tables import MEGATRON_FLAGS, MEGATRON_PAGE, current_flags, fate, megatron_table, page

BASELINE = parse_args(MINIMAL)
BY_NAME = {flag.name: flag for flag in OLD_FLAGS}
VALUES = {int: "3", float: "0.5", str: "word", None: ""}


def test_the_page_has_a_row_for_every_flag() -> None:
    """If it fails, `python -m tests.config.tables` updates the page."""
    text = MEGATRON_PAGE.read_text()
    assert text == page(text, {"megatron flags": megatron_table()})
    assert len(MEGATRON_FLAGS) == len(set(MEGATRON_FLAGS)) > 850


@pytest.mark.parametrize(
    "name", [name for name in MEGATRON_FLAGS if fate(name, current_flags())[0] != "obeyed"]
)
def test_a_flag_that_is_not_obeyed_has_the_fate_of_its_row(name: str) -> None:
    status, note = fate(name, current_flags())
    flag = BY_NAME.get(name)
    if status == "no effect":
        assert flag is not None
        parsed = parse_command_line([*MINIMAL, *f"{name} {VALUES[flag.takes]}".split()])
        assert parsed.config == BASELINE
        assert parsed.notes == (f"{name}: no effect here: {note}",)
        return
    if status == "one value":
        assert flag is not None
        for value in flag.allowed:
            assert parse_args([*MINIMAL, name, str(value)]) == BASELINE
        value = "7" if flag.takes is not str else "word"
        with pytest.raises(UsageError, match=rf"^{name} .*: only .* possible: "):
            parse_command_line([*MINIMAL, name, value])
        return
    for argv in ([name], [name, "1"], [f"{name}=1"], [name, "a", "b"]):
        with pytest.raises(UsageError) as refused:
            parse_command_line([*MINIMAL, *argv])
        assert str(refused.value).startswith(f"{name} ")
        assert str(refused.value).endswith(f": not here: {note}")


TODAY = [
    ("--data-parallel-sharding-strategy no_shard", ""),
    ("--data-parallel-sharding-strategy optim", "--zero-stage 1"),
    ("--data-parallel-sharding-strategy optim_grads", "--zero-stage 2"),
    ("--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer", "--zero-stage 3"),
    ("--use-torch-fsdp2", "--zero-stage 3"),
    ("--save a --save-retain-interval 50", "--save a --keep-last 1 --keep-every 50"),
    ("--bf16 --fp8-format hybrid", "--bf16 --fp8"),
    ("--no-position-embedding", "--position-embedding-type none"),
    ("--no-pad-vocab-size", "--make-vocab-size-divisible-by 1"),
    ("--disable-pad-vocab-size", "--make-vocab-size-divisible-by 1"),
    ("--encoder-num-layers 2", ""),
]


@pytest.mark.parametrize(("theirs", "ours"), TODAY)
def test_a_flag_with_another_name_says_what_ours_says(theirs: str, ours: str) -> None:
    assert parse_args([*MINIMAL, *theirs.split()]) == parse_args([*MINIMAL, *ours.split()])


def test_every_other_name_has_a_test() -> None:
    assert {flag.name for flag in RENAMED_TODAY} <= {word for theirs, _ in TODAY for word in theirs.split()}


def test_every_entry_is_a_flag_of_megatron() -> None:
    named = {flag.name for flag in (*RENAMED_TODAY, *ONLY_TODAY, *IDLE_TODAY, *REFUSED_TODAY)}
    assert named <= set(MEGATRON_FLAGS)
    for beginning in FEATURES:
        assert any(name.startswith(beginning) for name in MEGATRON_FLAGS), beginning


def test_a_value_that_a_flag_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"--fp8-format e4m3: must be hybrid$"):
        parse_args([*MINIMAL, "--fp8-format", "e4m3"])
    with pytest.raises(UsageError, match=r"--use-distributed-optimizer .given.: contradicts --data-parallel"):
        parse_args(
            [*MINIMAL, *"--data-parallel-sharding-strategy no_shard --use-distributed-optimizer".split()]
        )


@pytest.mark.parametrize("name", ["--moe-of-the-future", "--rl-x=3"])
def test_new_flags_of_a_missing_feature_are_refused_too(name: str) -> None:
    with pytest.raises(UsageError, match="not here: "):
        parse_args([*MINIMAL, name])
