"""Texts of --sample-prompt: they do not change a run; a prompt without tokens is refused before it."""

from pathlib import Path

import pytest

from megatron_zpp.config.root import Config, parse_args
from megatron_zpp.tokenizer.null import NullTokenizer
from megatron_zpp.train.inputs import check_prompts
from tests.support import nightly, records_of, trained
from tests.train.test_tensor_parallel import FLAGS


@pytest.mark.parametrize(("prompt", "reason"), [(" ", "has no tokens; give text"), ("1 x", "x")])
def test_a_prompt_is_refused_before_the_run(prompt: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^--sample-prompt {prompt}: .*{reason}"):
        check_prompts(["1 2", prompt], NullTokenizer(49))


@pytest.mark.parametrize("tensor", [1, nightly(2)])
def test_texts_at_stage_3_change_no_bit_of_a_run(tensor: int, tmp_path: Path) -> None:
    """2 data ranks × `tensor` tensor ranks, with dropout: checkpoints are those of a run without prompts."""
    shared = "--zero-stage 3 --hidden-dropout 0.1 --save-interval 3 --tensor-model-parallel-size".split()
    shared.append(str(tensor))

    def run(name: str, *flags: str) -> dict[str, bytes]:
        place = tmp_path / name
        files = ["--save", str(place), "--metrics-file", str(tmp_path / f"{name}.jsonl")]
        trained(*FLAGS, *shared, *files, *flags, processes=2 * tensor)
        return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.safetensors")}

    plain, sampled = run("plain"), run("sampled", "--sample-prompt", "7 8", "9")
    assert len(plain) > 1
    assert sampled == plain
    texts = [record for record in records_of(tmp_path / "sampled.jsonl") if "sample" in record]
    assert [record["iteration"] for record in texts] == [0, 3, 6]
    for record in texts:
        assert record["sample"].startswith("7 8 ")
        assert record["sample_2"].startswith("9 ")
    assert len({record["sample"] for record in texts}) > 1


def test_the_one_prompt_of_an_earlier_version_is_read() -> None:
    config = parse_args([*FLAGS, "--sample-prompt", "7 8"])
    saved = config.to_json()
    saved["evaluation"]["sample_prompt"] = "7 8"
    assert Config.from_json(saved) == config
