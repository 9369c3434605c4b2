"""What a line without a document is called, and what its file needs."""

import pytest

from megatron_zpp.data.corpus.json_lines import Problem, parse_lines, split_lines

ARRAY = "a JSON array, not an object; write each of its objects on one line: jq -c '.[]'"
UTF16 = "null bytes: UTF-16 or UTF-32, which iconv -f UTF-16 -t UTF-8 converts, or not text at all"


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        ('{"text": "a"}\n'.encode("utf-16"), UTF16),
        ('{"text": "\u00e9"}\n'.encode("utf-32"), UTF16),
        (b'{\n  "text": "a"\n}\n', "an object on several lines; write each on one line: jq -c ."),
        (b'[\n{"text": "a"}]\n', ARRAY),
        (b'[{"text": "a"}]\n', ARRAY),
        (b'{"text": "a",}\n', "not JSON: "),  # then the words of the Python that runs
    ],
)
def test_a_line_of_another_kind_of_file_is_named_with_the_remedy(content: bytes, detail: str) -> None:
    first = next(iter(parse_lines(split_lines(content), ["text"])))
    assert isinstance(first, Problem)
    assert first.detail.startswith(detail)
