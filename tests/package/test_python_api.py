"""The names of the Python API, and the program of its page: trained as printed, and against plain torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_zpp
from tests.support import ROOT, environment, free_port, nightly

PAGE = ROOT / "docs" / "guide" / "python_api.md"
STEP = re.compile(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    path = tmp_path_factory.mktemp("api") / "own_model.py"
    path.write_text(code)
    return path


def losses(program: Path, *launcher: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        cwd=program.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for _, loss, _ in STEP.findall(done.stdout)]


def test_every_name_can_be_imported_and_is_on_the_page() -> None:
    for name in megatron_zpp.__all__:
        assert getattr(megatron_zpp, name) is not None
        assert name.startswith("__") or f"`{name}`" in PAGE.read_text()
    with pytest.raises(AttributeError, match="no attribute 'GTP'"):
        _ = megatron_zpp.GTP


def test_the_package_itself_imports_no_torch() -> None:
    code = "import sys, megatron_zpp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def expected(program: Path, ranks: int) -> list[float]:
    """What plain torch gives for the program's model, initial weights and batches."""
    place: dict[str, object] = {"__name__": "own_model"}
    exec(program.read_text(), place)
    model = place["Regression"]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            place["initialize"](name, parameter)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    found = []
    for step in range(place["STEPS"]):
        optimizer.zero_grad()
        loss = torch.stack([model(*place["batch_of"](step, rank)) for rank in range(ranks)]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found[9::10]


@pytest.mark.parametrize("ranks", [nightly(1), 2])
def test_the_program_trains_as_plain_torch_does(program: Path, ranks: int) -> None:
    """With torch's AdamW and clipping; the batch of several ranks is that of all of them."""
    port = f"--master-port={free_port()}"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), port] if ranks > 1 else []
    found = losses(program, *launcher)
    assert found == pytest.approx(expected(program, ranks), abs=1e-3)  # printed with four digits
    assert found[-1] < 0.3 * found[0]


@pytest.mark.nightly
def test_the_program_trains_in_bf16(program: Path, tmp_path: Path) -> None:
    """With the precision that the page names for GPUs; 8 bits of mantissa change the loss a little."""
    assert "`PrecisionConfig(bf16=True)`" in PAGE.read_text()
    changed = tmp_path / "own_model.py"
    changed.write_text(
        program.read_text().replace("PrecisionConfig(fp32=True)", "PrecisionConfig(bf16=True)")
    )
    assert losses(changed) == pytest.approx(expected(program, 1), rel=0.1)
