"""DeepSpeed's JSON file as a file: what cannot be read or is not a JSON object is refused."""

from pathlib import Path

import pytest

from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args
from tests.config.command_line import MINIMAL
from tests.config.deepspeed import parse


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1 column 1: not JSON"),
        ('{"fp16": {"enabled": true}, // half\n}', "line 1 column 29: not JSON (…); JSON has no comments"),
        ('{\n  "gradient_clipping": 1.0,\n}', "line 3 column 1: not JSON (…"),
        ('{"gradient_clipping": 1.0', "not JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ("3", "must hold a JSON object"),
        ('{"a": 1, "a": 2}', 'the key "a" appears twice in one object'),
        ('{"zero_optimization": {"stage": 2, "stage": 2}}', 'the key "stage" appears twice'),
        ('{"gradient_clipping": NaN}', "gradient_clipping nan: must be a finite number"),
        ('{"aio": {"block_size": [1, -Infinity]}}', "block_size -inf: must be a finite number"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping inf: must be a finite number"),
        ('{"gradient_clipping": ' + "9" * 5000 + "}", "gradient_clipping inf: must be a finite number"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"aio": "' + "x" * (1 << 20) + '"}', "cannot be read (is longer than 1,048,576 bytes)"),
    ],
    ids=range(14),
)
def test_a_file_that_is_not_a_json_object_is_refused(file: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(file, text)
    message = str(refused.value)
    assert message.startswith("--deepspeed_config ds.json: ")
    assert "\n" not in message
    assert len(message) < 300
    place = 0
    for part in said.split("…"):
        place = message.index(part, place)


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    file.write_bytes(b'{"a": "\xff"}')
    for name, said in (
        ("gone.json", "cannot be read (No such file or directory); name"),
        (".", "cannot be read (is a directory); name"),
        ("a\0b", "embedded null byte"),
        ("ds.json", "byte 7: not UTF-8; name"),
    ):
        with pytest.raises(UsageError, match=r"^--deepspeed_config ") as refused:
            parse_args([*MINIMAL, "--deepspeed_config", name])
        assert said in str(refused.value)


def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    assert parse(file, '\ufeff{"gradient_clipping": 2}').config.optimizer.clip_grad == 2.0
