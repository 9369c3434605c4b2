"""What a run that goes on reads otherwise than the run that saved: said, not refused, as it may be meant.

Other data sets or weights are the matter of data/carry_on.py.
"""

from typing import Any

from megatron_zpp.config.data import DEFAULT_SPLIT, MASKS
from megatron_zpp.config.root import Config

_READ = (  # settings that decide which sample has which number
    ("data", "split"),
    ("data", "dataset_order"),
    ("data", "json_key"),
    ("data", "append_eod"),
    ("data", "mock_data"),
    ("training", "seed"),
    ("model", "seq_length"),
)
_YOUNGER = {  # settings that older checkpoints do not name, and what their runs had
    "dataset_order": "windows",
    "json_key": "text",
    "append_eod": False,
}


def data_changes(saved: dict[str, dict[str, Any]], ranks: int, config: Config, requested: int) -> list[str]:
    """Lines for the log, from the settings and ranks of the checkpoint.

    `requested` training samples are asked for now, on which Megatron-LM's order depends.
    """
    present, lines = config.to_json(), []
    for part, name in _READ:
        before, now = (_value(settings.get(part, {}), name) for settings in (saved, present))
        if before != now and not (before is None and now == _YOUNGER.get(name)):
            flag = "--" + name.replace("_", "-")
            lines.append(f" WARNING: {flag} was {_shown(before)} and is {_shown(now)}: {_FROM_NOW}")
    numbered = not lines
    for name in MASKS:
        before, now = (bool(settings.get("data", {}).get(name)) for settings in (saved, present))
        if before != now:
            flag = "--" + name.replace("_", "-")
            given = "given, and was not" if now else "not given, and was"
            lines.append(f" WARNING: {flag} is {given}: from here on the model is told so of documents")
    if config.data.dataset_order == "megatron" and numbered:
        training = saved.get("training", {})
        batch = training.get("global_batch_size") or (training.get("micro_batch_size") or 0) * ranks
        before = training.get("train_samples") or (training.get("train_iters") or 0) * batch
        if before != requested:
            lines.append(
                f" WARNING: the run was to read {before} samples and is to read {requested}, on which the "
                f"order of --dataset-order megatron depends: {_FROM_NOW}"
            )
    return lines


_FROM_NOW = "from here on samples are numbered by the present flags, so that some may repeat or be left out"


def _value(settings: dict[str, Any], name: str) -> Any:
    """--split as it cuts: it has a default for --data-path, and is of no use beside --train-data-path."""
    if name != "split" or not (settings.get("data_path") or settings.get("train_data_path")):
        return settings.get(name)
    cut = settings.get("split") or DEFAULT_SPLIT
    return cut if settings.get("data_path") else "all of --train-data-path"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
