"""Models of the Hugging Face hub: downloads to the cache of its library, and uploads.

The library, huggingface_hub, obeys HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, and continues a
download that was interrupted. It is imported where a name is on the hub.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron_zpp.storage.files import locked

PREFIX = "hf:"
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_ON_HUB = re.compile(rf"{PREFIX}({_REPOSITORY})(?:@([\w./-]+))?")
_SETTINGS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt"),
)
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_FRESH = 60.0  # seconds in which a download answers other processes of the machine
_found: dict[tuple[str, bool], tuple[str, Path]] = {}  # by name, and whether with weights, in this process


def find_model(flag: str, name: str, *, weights: bool = True) -> tuple[str, Path]:
    """Return name and directory of hf:DIR, or of hf:ORG/NAME[@REVISION], which is downloaded.

    The name of a model of the hub has its commit. A process asks the hub once. Of several processes of a
    machine one does, and the others wait for it. Without `weights` only config.json and the tokenizer's files
    are downloaded. A DIR need not exist. Raises ValueError, in one line that names `flag`, if the hub does
    not give the files.
    """
    directory, on_hub = Path(name.removeprefix(PREFIX)), _ON_HUB.fullmatch(name)
    if on_hub is None or directory.is_dir():
        return name, directory
    known = _found.get((name, True)) or _found.get((name, weights))
    if known is None:
        repository, revision = on_hub[1], on_hub[2] or "main"
        with _in_a_line(flag, name):
            known = _downloaded(name, repository, revision, weights=weights)
        _found[name, weights] = _found[known[0], weights] = known
    return known


def make_repository(flag: str, repository: str) -> None:
    """Make sure that ORG/NAME is on the hub and writable; a new one is private. Raises as `find_model`."""
    if not re.fullmatch(_REPOSITORY, repository):
        raise ValueError(f"{flag} {repository}: must be ORG/NAME")
    with _in_a_line(flag, repository):
        from huggingface_hub import HfApi

        HfApi().create_repo(repository, private=True, exist_ok=True)


def push(flag: str, repository: str, directory: Path) -> str:
    """Upload a directory's files in one commit; return the URL of the commit. Raises as `make_repository`."""
    with _in_a_line(flag, repository):
        from huggingface_hub import HfApi

        done = HfApi().upload_folder(
            repo_id=repository, folder_path=directory, commit_message="Exported by megatron_zpp"
        )
        return str(done.commit_url)


def _downloaded(name: str, repository: str, revision: str, *, weights: bool) -> tuple[str, Path]:
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    files = f"{revision.replace('/', '--')}.{'model' if weights else 'settings'}"
    record = cache / ".locks" / f"models--{repository.replace('/', '--')}" / f"megatron_zpp.{files}"
    patterns = [*_SETTINGS, *(_WEIGHTS if weights else ())]

    with ExitStack() as held:
        with suppress(OSError):  # nobody can write to this cache, so nobody downloads
            record.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(record))
        if commit := _just_downloaded(record):
            with suppress(OSError):  # the cache was emptied since
                known = {"revision": commit, "allow_patterns": patterns, "local_files_only": True}
                return f"{PREFIX}{repository}@{commit}", Path(snapshot_download(repository, **known))
        if not constants.HF_HUB_OFFLINE:
            sys.stderr.write(f"{name}: downloading what is not yet in {cache}\n")
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
        with suppress(OSError):
            record.write_text(json.dumps({"commit": path.name, "time": time.time()}))
        return f"{PREFIX}{repository}@{path.name}", path


def _just_downloaded(record: Path) -> str | None:
    """Return the commit that another process has downloaded a moment ago."""
    try:
        found = json.loads(record.read_text())
        return found["commit"] if 0 <= time.time() - found["time"] < _FRESH else None
    except (OSError, ValueError):  # nobody has
        return None


@contextmanager
def _in_a_line(flag: str, name: str) -> Iterator[None]:
    """Turn what the library raises into a ValueError of one line, with the library's own remedy."""
    try:
        yield
    except ModuleNotFoundError:
        raise ValueError(f"{flag} {name}: needs huggingface_hub: pip install huggingface_hub") from None
    except Exception as error:  # of HTTP, files or names; the library has no common base
        where = "is no directory here; " if name.startswith(PREFIX) else ""
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{flag} {name}: {where}{said}") from error
