"""A directory in Hugging Face's format, and how a person named it."""

from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import HUGGINGFACE
from megatron_zpp.storage.files import check_writable

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class NamedDirectory:
    """`flag` and `shown` begin every line that says what is wrong with what lies at `path`."""

    flag: str
    shown: str
    path: Path

    def error(self, fix: str) -> ValueError:
        """Return the error that names the directory, with `fix`: what is wrong and what would be right."""
        return option_error(self.flag, self.shown, fix)

    @property
    def is_on_hub(self) -> bool:
        """Whether it is a download, which every machine finds by the same name, in a place of its own."""
        return self.shown.startswith(HUGGINGFACE) and self.path != Path(self.shown.removeprefix(HUGGINGFACE))


def named_directory(flag: str, shown: str, *, weights: bool = True) -> NamedDirectory:
    """Return the directory that DIR, hf:DIR or hf:ORG/NAME[@REVISION] names; the last one is downloaded.

    Without `weights` it has config.json and the tokenizer alone.
    """
    if not shown.startswith(HUGGINGFACE):
        return NamedDirectory(flag, shown, Path(shown))
    from megatron_zpp.storage.hub import find_model

    return NamedDirectory(flag, *find_model(flag, shown, weights=weights))


def check_empty(flag: str, target: Path) -> None:
    """Raise ValueError unless `target` is an empty directory, or can be created."""
    named = NamedDirectory(flag, str(target), target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise named.error("exists and is not an empty directory; name another one")
    check_writable(flag, str(target.parent))
