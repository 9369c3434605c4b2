"""Which test executes which line, how long each takes, and which lines a run on two nodes executes."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.common import ROOT

RUN = (
    "--tokenizer-type NullTokenizer --vocab-size 256 --num-layers 2 --hidden-size 512 "
    "--num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 "
    "--train-iters 4 --log-interval 1 --eval-interval 2 --eval-iters 1 --split 80,10,10 --save-interval 2 "
    "--bf16 --zero-stage 3 --zero-quantized-weights --zero-quantized-weights-format delta4 "
    "--zero-quantized-gradients --zero-quantized-gradients-format rotated4 --zero-hpz-partition-size auto "
    "--zero-gradient-partition-size auto"
).split()  # a shard of a layer has several chunks


class Executed:
    """What was recorded in the directory `state`, where the files of coverage.py and of JUnit are."""

    def __init__(self, state: Path, processes: int) -> None:
        self._state, self._processes = state.absolute(), processes
        self._state.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}  # of the tests that passed
        self._tests: dict[str, dict[int, set[str]]] = {}  # that execute a line
        self._newest: set[str] = set()  # tests recorded after the first record
        self._prepared: dict[str, dict[int, set[str]]] = {}  # for which it may have been executed before

    def record(self, tests: list[str]) -> None:
        """Run tests, all of them by default, under coverage; their lines join those that are known."""
        name = f"tests-{len(self._reports())}"
        spread = f"--numprocesses {self._processes} --dist loadfile --no-loadscope-reorder".split()
        command = [sys.executable, "-m", "pytest", "-p", "tests.line_contexts", "--timeout", "600", *spread]
        partial = self._state / f"{name}.partial"
        subprocess.run([*command, f"--junitxml={partial}", *tests], cwd=ROOT, env=self._traced(name))
        self._combine(name)
        partial.rename(self._state / f"{name}.xml")

    def load(self) -> None:
        """Read what `record` has written; it runs now unless it has done so."""
        if not self._reports():
            self.record([])
        for number, report in enumerate(self._reports()):
            for case in xml.etree.ElementTree.parse(report).iter("testcase"):
                test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                if {child.tag for child in case} & {"failure", "error", "skipped"}:
                    self.seconds.pop(test, None)
                else:
                    self.seconds[test] = float(case.get("time", 0))
                    self._newest |= {test} if number else set()
        for report in self._reports():
            self._read(report.stem)

    def lines(self) -> set[tuple[str, int]]:
        """(file, line) of all that two runs on two nodes execute: one saves, one resumes."""
        if not (self._state / "run").exists():
            with tempfile.TemporaryDirectory() as directory:
                _write_documents(f"{directory}/data")
                for more in (["--exit-interval", "2"], []):
                    _run_two_nodes(Path(directory), more, self._traced("run"))
            self._combine("run")
        lines = set()
        for path, contexts in self._contexts("run"):
            lines |= {(path, line) for line in contexts}
        return lines

    def choose(self, file: str, line: int, seconds: float, *, imported: bool, killer: str = "") -> list[str]:
        """Tests that execute a line, or any line of the file that is `imported`, the cheapest first.

        Ahead of them `killer` and those of the newest records; behind them those of a folder whose fixture
        executes it. If all took longer than `seconds`: in this order those that execute it, those of the
        mirrored folder, and one case of each function.
        """
        found, prepared = (
            set().union(*lines.values()) if imported else lines.get(line, set())
            for lines in (self._tests.get(file, {}), self._prepared.get(file, {}))
        )
        folder = f"tests/{file.split('/')[1]}/"
        cases: Counter[str] = Counter()
        order = []
        for test in sorted((found | prepared | {killer}) & self.seconds.keys(), key=self._cost):
            function = test.partition("[")[0]
            group = (test != killer and test not in self._newest, test not in found)
            order.append((*group, not test.startswith(folder), cases[function], *self._cost(test)))
            cases[function] += 1
        chosen: dict[str, tuple[bool, bool, float]] = {}
        for later, fixture, _, _, took, test in sorted(order):
            if not chosen or took <= seconds:
                chosen[test] = later, fixture, took
                seconds -= took
        return sorted(chosen, key=lambda test: (*chosen[test], test))

    def forget(self, tests: Iterable[str]) -> None:
        """Choose these tests no more."""
        for test in tests:
            self.seconds.pop(test, None)

    def _cost(self, test: str) -> tuple[float, str]:
        return self.seconds[test], test

    def _reports(self) -> list[Path]:
        return sorted(self._state.glob("tests-*.xml"))

    def _traced(self, name: str) -> dict[str, str]:
        rules = str(ROOT / "tests" / "coverage.ini")
        traced = {"COVERAGE_PROCESS_START": rules, "COVERAGE_FILE": str(self._state / name)}
        return {**environment(), **traced}

    def _combine(self, name: str) -> None:
        command = [sys.executable, "-m", "coverage", "combine", "--quiet"]
        environment = {**os.environ, "COVERAGE_FILE": str(self._state / name)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)

    def _contexts(self, name: str) -> Iterator[tuple[str, dict[int, list[str]]]]:
        """Each file with the contexts in which its lines were executed; ends the program if one is gone."""
        from coverage import CoverageData

        data = CoverageData(str(self._state / name))
        data.read()
        for path in data.measured_files():
            file = path[path.rindex("megatron_zpp/") :]
            if not (ROOT / file).exists():
                anew = f"remove {self._state}, and record anew: benchmarks/mutations/run.py --record"
                raise SystemExit(f"the record {self._state / name} is of an older tree, with {file}; {anew}")
            yield file, data.contexts_by_lineno(path)

    def _read(self, name: str) -> None:
        """What prepares one test may prepare all of its folder, which share fixtures."""
        folders: defaultdict[str, set[str]] = defaultdict(set)
        for test in self.seconds:
            folders[test.partition("::")[0].rpartition("/")[0]].add(test)
        for path, lines in self._contexts(name):
            tests, prepared = (
                known.setdefault(path, defaultdict(set)) for known in (self._tests, self._prepared)
            )
            for line, contexts in lines.items():
                for context in contexts:
                    test, _, moment = context.removeprefix("none|").rpartition(" ")
                    if moment == "(setup)":
                        prepared[line] |= folders[test.partition("::")[0].rpartition("/")[0]]
                    else:
                        tests[line].add(test)


def environment() -> dict[str, str]:
    """This environment, with few threads, and without what a test that started this program has in it."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def _write_documents(prefix: str) -> None:
    import numpy as np

    from megatron_zpp.data.indexed_writer import IndexedDatasetWriter

    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for path in sorted((ROOT / "megatron_zpp" / "zero").glob("*.py")):
            writer.add_document(np.append(np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16), 256))


def _run_two_nodes(directory: Path, flags: list[str], environment: dict[str, str]) -> None:
    """Nodes of two ranks, as these are told; they share a machine."""
    from tests.support import free_port

    port, save = str(free_port()), str(directory / "save")
    command = [sys.executable, "pretrain_gpt.py", *RUN, "--data-path", f"{directory}/data", *flags]
    ranks = []
    for rank in range(4):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        argv = [*command, "--save", save, "--load", save]
        ranks.append(subprocess.Popen(argv, cwd=ROOT, env=environment | place))
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise SystemExit("the run on two nodes failed")
