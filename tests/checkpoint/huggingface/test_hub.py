"""Models of the hub: downloaded once, pinned to a commit, cached, and pushed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.huggingface.gpt2 import check_equal, tensors
from tests.hub_server import COMMIT, TOKEN, Hub, hub_server
from tests.support import program

RUN = (
    "--mock-data --micro-batch-size 2 --eval-iters 0 --num-workers 0 --train-iters 1 --lr 1e-30 "
    "--weight-decay 0 --device cpu"
).split()
SAMPLE = ("megatron_zpp.commands.sample", "--max-new-tokens", "2", "--device", "cpu", "--load")


@pytest.fixture
def hub(good: Path) -> Iterator[Hub]:
    with hub_server() as hub:
        hub.put("org/tiny", good)
        yield hub


def test_a_model_of_the_hub_is_trained_sampled_and_pushed_back(hub: Hub, good: Path, tmp_path: Path) -> None:
    """One of two ranks asks the hub; everything else names the commit, and works without the hub."""
    online = hub.environment(tmp_path / "cache", HF_TOKEN=TOKEN)
    flags = [*RUN, "--load", "hf:org/tiny", "--save", str(tmp_path / "run")]
    ran = program("pretrain_gpt", *flags, processes=2, **online)
    assert ran.returncode == 0, ran.stderr
    assert f"loaded the weights of hf:org/tiny@{COMMIT}; starting at iteration 0" in ran.stdout
    asked = [request for request in hub.requests if "/org/tiny" in request and request.startswith("GET")]
    assert len(asked) == len(set(asked)), asked
    assert f"tokenizer_model: hf:org/tiny@{COMMIT}" in (tmp_path / "run/config.yaml").read_text()

    hub.requests.clear()
    offline = hub.environment(tmp_path / "cache", HF_HUB_OFFLINE="1")
    sampled = program(*SAMPLE, "hf:org/tiny", **offline)
    assert sampled.returncode == 0, sampled.stderr
    (tmp_path / "text").write_text("a b c d e f g h")
    argv = ["--valid-data", tmp_path / "text", "--device", "cpu", "--load"]
    scored = [
        program("megatron_zpp.commands.evaluate", *argv, load, processes=processes, **offline)
        for load, processes in (("hf:org/tiny@main", 2), (f"hf:{good}", 1))
    ]
    assert [one.returncode for one in scored] == [0, 0], scored[0].stderr
    assert scored[0].stdout == scored[1].stdout
    imported = program(
        "megatron_zpp.commands.import_checkpoint", "hf:org/tiny", tmp_path / "imported", **offline
    )
    assert imported.returncode == 0, imported.stderr
    state = json.loads((tmp_path / "imported/iter_0000000/state.json").read_text())
    assert state["config"]["tokenizer"]["tokenizer_model"] == f"hf:org/tiny@{COMMIT}"
    assert hub.requests == []

    argv = [tmp_path / "run", tmp_path / "out", "--push-to-hub", "org/new"]
    pushed = program("megatron_zpp.commands.export_checkpoint", *argv, **online)
    assert pushed.returncode == 0, pushed.stderr
    assert f"pushed: {hub.endpoint}/org/new/commit/{COMMIT}" in pushed.stdout
    assert hub.models["org/new"] == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    check_equal(tensors(tmp_path / "out"), tensors(good))
    assert all(TOKEN not in one.stdout + one.stderr for one in (ran, pushed))


def test_a_plan_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    flags = "--mock-data --micro-batch-size 2 --train-iters 1 --lr 1 --dry-run --load hf:org/tiny".split()
    planned = program("pretrain_gpt", *flags, **hub.environment(tmp_path))
    assert planned.returncode == 0, planned.stderr
    assert "2 layers" in planned.stdout
    assert not [request for request in hub.requests if "safetensors" in request]


def test_an_interrupted_download_continues_with_the_files_that_are_missing(hub: Hub, tmp_path: Path) -> None:
    hub.cut = "model.safetensors"
    place = hub.environment(tmp_path)
    broken = program(*SAMPLE, "hf:org/tiny", **place)
    assert broken.returncode == 1
    assert [line for line in broken.stderr.splitlines() if "error: --load hf:org/tiny: " in line]
    hub.cut = None
    hub.requests.clear()
    assert program(*SAMPLE, "hf:org/tiny", **place).returncode == 0
    files = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert files == {"model.safetensors"}


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "LocalEntryNotFoundError: .*HF_HUB_OFFLINE"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "LocalEntryNotFoundError: .*Connection refused"),
        ("org/none", {}, "RepositoryNotFoundError: "),
        ("org/tiny@v2", {}, "RevisionNotFoundError: .*/revision/v2"),
        ("org/closed", {"HF_TOKEN": "hf_wrong"}, "RepositoryNotFoundError: "),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_one_line(
    hub: Hub, good: Path, tmp_path: Path, name: str, place: dict[str, str], said: str
) -> None:
    hub.put("org/closed", good)
    hub.closed.add("org/closed")
    done = program("pretrain_gpt", *RUN, "--load", f"hf:{name}", **hub.environment(tmp_path, **place))
    assert done.returncode == 1
    *_, line = done.stderr.splitlines()
    assert re.match(f"pretrain_gpt.py: error: --load hf:{name}: is no directory here; {said}", line), line
    assert "hf_wrong" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_push_without_rights_is_refused_before_the_export(hub: Hub, tmp_path: Path) -> None:
    argv = [tmp_path / "run", tmp_path / "out", "--push-to-hub"]
    place = hub.environment(tmp_path, HF_TOKEN="hf_wrong")
    for name, said in (("org/new", "HfHubHTTPError: .*401 Unauth"), ("new", "must be ORG/NAME")):
        done = program("megatron_zpp.commands.export_checkpoint", *argv, name, **place)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.match(f"export_checkpoint.py: error: --push-to-hub {name}: {said}", done.stderr)
        assert "hf_wrong" not in done.stderr
