"""Plants small bugs, one at a time, and counts those that the tests find.

python benchmarks/mutations/run.py                      the result is benchmarks/results/mutations.json
python benchmarks/mutations/run.py --only FILE:LINE …   repeats mutants; --survivors all that survived
python benchmarks/mutations/run.py --seed N             other mutants; the result is mutations_N.json
python benchmarks/mutations/run.py --record [TEST …]    which test executes which line: all tests, or these

Mutants are uniform over the lines of zero/, checkpoint/, ops/, data/ and train/ at which operators.py has
something to change, and which a run on two nodes of two ranks executes that saves and resumes, with weights
and gradients of 4 bits. Lines are drawn by a hash of seed, file and text, so a change elsewhere draws the
same ones. Each line gets one bug, drawn by the same seed: first the operator, then the place.

For each mutant the tests that execute its line run in a copy of the tree until one fails: the test that has
found it in the committed result, new tests, and then the cheapest first; of many, as many as took 45 s when
they were recorded (executed.py says which). Lines outside of
functions count as executed by all tests of their file. In the end, all tests that failed run in the
unchanged copy; where one fails, its mutants meet the other tests. All tests of a mutant have 90 s. A mutant
that is left then has survived, unless the test that runs has taken more than 10 s and five times what it
took when recorded, and passes in the unchanged copy, with all that it needs, in less time: "time-out",
which counts as killed.

--state DIRECTORY has what was recorded, and the outcome of each mutant so far: the same command continues
after an interruption. The result's first_run has the first outcome of each mutant, others the last.
equivalent.json lists mutants that no test can tell, with the reason. They do not run, and do not count.
The exit status is 1 if the kill rate is below 0.93.
"""

import hashlib
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import RESULTS, program_parser, save_result
from benchmarks.mutations.executed import ROOT, Executed
from benchmarks.mutations.operators import Mutation, imported_lines, mutations
from benchmarks.mutations.tree import Tested, Tree

SEED, MUTANTS, LIMIT_SECONDS, RECORDED_SECONDS, LEAST_RATE = 48, 100, 90, 45, 0.93
EQUIVALENT = Path(__file__).with_name("equivalent.json")
KILLED = ("killed", "time-out")


@dataclass(frozen=True)
class Mutant:
    """A bug in a file; its name is a hash of the line's text, and of what the seed draws with."""

    name: str
    file: str
    mutation: Mutation

    def facts(self) -> dict[str, Any]:
        """What the result says of it."""
        change = self.mutation
        before, after = (" ".join(text.split()) for text in (change.before, change.after))
        place = f"{self.file}:{change.line}"
        return {"name": self.name, "at": place, "operator": change.operator, "before": before, "after": after}


def sample(lines: Iterable[tuple[str, int]], seed: int = SEED, size: int = MUTANTS) -> list[Mutant]:
    """A mutant at each of `size` lines; those of a smaller sample are the first of a larger one."""
    of_files: defaultdict[str, set[int]] = defaultdict(set)
    for file, line in lines:
        of_files[file].add(line)
    mutants = []
    for file, executed in of_files.items():
        source = (ROOT / file).read_text()
        possible: defaultdict[int, list[Mutation]] = defaultdict(list)
        for mutation in mutations(source):
            possible[mutation.line].append(mutation)
        seen: Counter[str] = Counter()
        for line, text in enumerate(map(str.strip, source.splitlines()), 1):
            seen[text] += 1
            if line in executed and line in possible:
                name = hashlib.sha256(f"{seed} {file} {seen[text]} {text}".encode()).hexdigest()[:16]
                draw = random.Random(name)
                operator = draw.choice(sorted({mutation.operator for mutation in possible[line]}))
                same = [mutation for mutation in possible[line] if mutation.operator == operator]
                mutants.append(Mutant(name, file, draw.choice(same)))
    print(f"seed {seed}: {size} of {len(mutants)} lines in {len(of_files)} files", flush=True)
    return sorted(mutants, key=lambda mutant: mutant.name)[:size]


class Judge:
    """Tests mutants in a few trees at a time."""

    def __init__(self, executed: Executed, directory: Path, jobs: int, killers: dict[str, str]) -> None:
        from megatron_zpp.native.cache import cache_directory

        self._executed, self._killers = executed, killers
        self._trees: SimpleQueue[Tree] = SimpleQueue()
        shutil.copytree(cache_directory({"HOME": str(Path.home())}), directory / "kernels")
        for number in range(jobs):
            self._trees.put(Tree(directory, number))

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        """The outcome: killed, time-out, survived, no tests, or error if these cannot be collected."""
        tree = self._trees.get()
        try:
            return self._judge(mutant, tree)
        finally:
            self._trees.put(tree)

    def _judge(self, mutant: Mutant, tree: Tree) -> dict[str, Any]:
        source, line = (ROOT / mutant.file).read_text(), mutant.mutation.line
        imported = line in imported_lines(source)
        tests = self._executed.choose(
            mutant.file, line, RECORDED_SECONDS, imported=imported, killer=self._killers.get(mutant.name, "")
        )
        facts, outcome = mutant.facts() | {"tests": len(tests)}, "survived" if tests else "no tests"
        tested = Tested(0, (), 0)
        if tests:
            tree.write(mutant.file, mutant.mutation.apply(source))
            tested = tree.run(tests, LIMIT_SECONDS, self._patience, "-x")
            tree.write(mutant.file, source)
        if tested.status is None and tested.failed:
            unchanged = tree.run([*tested.failed], tested.ran, self._patience)
            outcome = "survived" if unchanged.status else "time-out"
        elif tested.status and not tested.failed:  # not even collected
            unchanged = tree.run(tests, LIMIT_SECONDS, self._patience, "--collect-only")
            outcome = "error" if unchanged.status else "killed"
        elif tested.status:
            outcome = "killed"
        by = "".join(tested.failed[:1]) if outcome in KILLED else ""
        return facts | {"outcome": outcome, "by": by, "seconds": tested.seconds}

    def unreliable(self, tests: set[str]) -> set[str]:
        """Tests that fail in the unchanged copy."""
        tree = self._trees.get()
        tested = tree.run(sorted(tests), LIMIT_SECONDS * len(tests), self._patience)
        self._trees.put(tree)
        return {*tested.failed}

    def _patience(self, test: str) -> float:
        return 5 * self._executed.seconds[test] + 10


def killers(name: str) -> dict[str, str]:
    """The test that found each mutant of the committed result `name`."""
    result = RESULTS / f"{name}.json"
    outcomes = json.loads(result.read_text())["figures"]["outcomes"] if result.exists() else []
    return {one["name"]: one["by"] for one in outcomes if one.get("by")}


def wilson(killed: int, of: int) -> list[float]:
    """The 95% interval of Wilson (1927) for a share."""
    z, share = 1.96, killed / of
    middle, half = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return [round((middle + side * half) / (1 + z * z / of), 3) for side in (-1, 1)]


def rate(outcomes: dict[str, dict[str, Any]], counted: set[str]) -> dict[str, Any]:
    """Counts, and the share that was killed of mutants which are not equivalent."""
    counts = Counter(outcomes[name]["outcome"] for name in counted)
    killed = sum(counts[outcome] for outcome in KILLED)
    share = {"kill_rate": round(killed / len(counted), 3), "interval_95": wilson(killed, len(counted))}
    return {**counts, **share}


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="how many")
    parser.add_argument(
        "--jobs", type=int, default=2, help="mutants at a time, and one less than the processes that record"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="FILE:LINE")
    parser.add_argument("--survivors", action="store_true", help="repeat all that survived")
    parser.add_argument("--record", nargs="*", metavar="TEST")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "mutations")
    options = parser.parse_args()
    executed = Executed(options.state, options.jobs + 1)
    if options.record is not None:
        executed.record(options.record)
        return
    executed.load()
    mutants = {mutant.name: mutant for mutant in sample(executed.lines(), options.seed, options.mutants)}
    listed = {one["name"]: one for one in json.loads(EQUIVALENT.read_text())}
    counted = mutants.keys() - listed.keys()
    result_name = "mutations" if options.seed == SEED else f"mutations_{options.seed}"
    log = options.state / "mutants.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    last = {record["name"]: record for record in records}

    def is_due(mutant: Mutant) -> bool:
        at, record = mutant.facts()["at"], last.get(mutant.name)
        again = options.survivors and record is not None and record["outcome"] not in KILLED
        return (record is None and not options.only) or again or at in options.only

    due = [mutants[name] for name in sorted(counted) if is_due(mutants[name])]
    with tempfile.TemporaryDirectory(prefix="m") as directory, ThreadPoolExecutor(options.jobs) as pool:
        judge = Judge(executed, Path(directory), options.jobs, killers(result_name))
        while due:
            for done in as_completed([pool.submit(judge.judge, mutant) for mutant in due]):
                record = done.result()
                records.append(record)
                with log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(
                    f"{record['outcome']:9} {record['at']} {record['before']} → {record['after']}", flush=True
                )
            last = {record["name"]: record for record in records}
            unreliable = judge.unreliable({last[name]["by"] for name in counted & last.keys()} - {""})
            print(f"fail in the unchanged copy: {sorted(unreliable)}", flush=True)
            executed.forget(unreliable)
            due = [mutants[name] for name in sorted(counted & last.keys()) if last[name]["by"] in unreliable]
    first = {record["name"]: record for record in reversed(records)}
    last = {record["name"]: record for record in records}
    if missing := len(counted - last.keys()):
        print(f"{missing} mutants are left")
        return
    result = {"seed": options.seed, "limit_seconds": LIMIT_SECONDS, "mutants": len(mutants)} | rate(
        last, counted
    )
    result |= {"equivalent": len(mutants) - len(counted), "first_run": rate(first, counted)}
    rows = [
        mutants[name].facts() | {"outcome": "equivalent", "reason": listed[name]["reason"]}
        if name in listed
        else last[name]
        for name in sorted(mutants)
    ]
    print(json.dumps(result, indent=2))
    print(f"written to {save_result(result_name, result | {'outcomes': rows})}")
    sys.exit(result["kill_rate"] < LEAST_RATE)


if __name__ == "__main__":
    main()
