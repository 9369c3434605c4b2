"""Prompts of --sample-prompt that a tokenizer can make nothing of."""

import pytest

from megatron_zpp.tokenizer.null import NullTokenizer
from megatron_zpp.train.inputs import check_prompt


@pytest.mark.parametrize(("prompt", "reason"), [(" ", "has no tokens; give text"), ("1 x", "x")])
def test_a_prompt_is_refused_before_the_run(prompt: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^--sample-prompt {prompt}: .*{reason}"):
        check_prompt(prompt, NullTokenizer(49))
