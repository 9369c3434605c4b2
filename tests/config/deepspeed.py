"""Reads a command line with a DeepSpeed file."""

import json
from pathlib import Path
from typing import Any

from megatron_zpp.config.root import CommandLine, parse_command_line
from tests.config.command_line import MINIMAL


def parse(file: Path, content: Any, *extra: str, argv: list[str] = MINIMAL, ranks: int = 1) -> CommandLine:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_command_line([*argv, "--deepspeed_config", file.name, *extra], ranks=lambda plan: ranks)
