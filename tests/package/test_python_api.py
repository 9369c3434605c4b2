"""The names of the Python API, and the program of its page: trained as printed, and against plain torch."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import megatron_zpp
from tests import support
from tests.support import ROOT, free_port, nightly, run

PAGE = ROOT / "docs" / "guide" / "python_api.md"
STEP = re.compile(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    path = tmp_path / "own_model.py"
    path.write_text(code)
    return path


def losses_of(said: str) -> list[float]:
    return [float(loss) for _, loss, _ in STEP.findall(said)]


def by_torchrun(program: Path) -> str:
    """What two nodes say, as the page starts them."""
    address = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {free_port()}".split()
    nodes = [("-m", "torch.distributed.run", *address, "--node-rank", str(node)) for node in (0, 1)]
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda launcher: run(*launcher, program, "60", cwd=program.parent), nodes))
    assert [done.returncode for done in ended] == [0, 0], [done.stderr for done in ended]
    return "".join(done.stdout for done in ended)


def forked(program: Path, steps: str, ranks: int = 1) -> str:
    """The same of ranks with nodes of their own, without the imports again."""
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = support.program("tests.package.page", program, steps, processes=ranks, **place)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_name_can_be_imported_and_is_on_the_page() -> None:
    given: dict[str, Any] = {}
    exec("from megatron_zpp import *", given)
    for name in dir(megatron_zpp):
        assert getattr(megatron_zpp, name) is given.get(name, megatron_zpp.__version__)
        assert name.startswith("__") or f"`{name}`" in PAGE.read_text()
    with pytest.raises(AttributeError, match="no attribute 'GTP'"):
        _ = megatron_zpp.GTP


def test_the_package_itself_imports_no_torch() -> None:
    code = "import sys, megatron_zpp; sys.exit('torch' in sys.modules)"
    assert run("-c", code).returncode == 0


class Plain:
    """The program's model and data under plain torch."""

    def __init__(self, program: Path) -> None:
        names: dict[str, Any] = {}
        exec(program.read_text().partition("\nif int(")[0], names)
        torch.manual_seed(1)
        self.model, self.samples = names["Regression"](), names["Samples"]()

    def losses(self) -> list[float]:
        """The loss of every tenth of 60 steps, with torch's AdamW, clipping and a linear rate."""
        matrices = [each for each in self.model.parameters() if each.dim() >= 2]
        others = [each for each in self.model.parameters() if each.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer, found = torch.optim.AdamW(groups), []
        for step in range(60):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min((step + 1) / 5, (100 - step - 1) / 95)
            optimizer.zero_grad()
            x, y = map(torch.from_numpy, self.samples.batch(np.arange(128 * step, 128 * (step + 1))))
            loss = self.model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return found[9::10]


@pytest.mark.parametrize("launched", [False, nightly(True)])
def test_the_program_trains_resumes_and_exports_as_plain_torch_does(program: Path, launched: bool) -> None:
    """Thirty steps on one rank, the others on two nodes, with the same samples."""
    plain = Plain(program)
    expected = plain.losses()
    first = losses_of(forked(program, "30"))
    assert first == pytest.approx(expected[:3], abs=2e-3)  # printed with four digits
    found = losses_of(by_torchrun(program) if launched else forked(program, "60", 2))
    assert found == pytest.approx(expected[3:], abs=2e-3)
    assert found[-1] < 0.3 * expected[0]
    exported = load_file(program.parent / "model.safetensors")
    for name, weight in plain.model.state_dict().items():
        assert torch.allclose(exported[name], weight, atol=2e-3), name
    saved = sorted(path.name for path in program.parent.glob("checkpoints/iter_*"))
    assert saved == ["iter_0000030", "iter_0000060"]
