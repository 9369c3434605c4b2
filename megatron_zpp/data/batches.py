"""Which samples each rank reads at each step: arithmetic only."""

from dataclasses import dataclass

from megatron_zpp.config.options import option_error


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size as a function of the samples consumed, and its division into micro-batches.

    A step that begins after c samples reads samples c to c + global batch size, whatever the number of ranks:
    micro-batch k of rank r consists of `micro_batch_size` samples from c + (k · ranks + r) · micro_batch_size
    on.

    `rampup` is Megatron-LM's START INCREMENT SAMPLES: over the first SAMPLES samples the global batch grows
    from START to `global_batch_size` in increments of INCREMENT, in stages of equally many samples.

    Raises ValueError if the sizes are not divisible.
    """

    micro_batch_size: int
    global_batch_size: int
    data_parallel_size: int
    rampup: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        assert min(self.micro_batch_size, self.global_batch_size, self.data_parallel_size) >= 1
        self._check_divisible("--global-batch-size", self.global_batch_size, self.global_batch_size)
        if self.rampup is None:
            return
        start, increment, samples = self.rampup
        flag, growth = "--rampup-batch-size", self.global_batch_size - start
        if start < 1 or increment < 1 or samples < 1:
            raise option_error(flag, self.rampup, "START, INCREMENT and SAMPLES must be at least 1")
        whole = f"--global-batch-size {self.global_batch_size}"
        if growth <= 0:
            raise option_error(flag, self.rampup, f"START must be below {whole}")
        if growth % increment:
            fix = f"INCREMENT {increment} must divide {whole} - START {start} = {growth}"
            raise option_error(flag, self.rampup, fix)
        self._check_divisible(flag, self.rampup, start, "START ")
        self._check_divisible(flag, self.rampup, increment, "INCREMENT ")

    def global_batch_size_at(self, consumed: int) -> int:
        """Return the samples of the step that begins after `consumed` samples."""
        start, increment, samples = self._ramp
        if consumed >= samples:
            return self.global_batch_size
        return start + consumed * self._increments // samples * increment

    def micro_batches_at(self, consumed: int) -> int:
        """Return the micro-batches per rank of the step that begins after `consumed` samples."""
        return self.global_batch_size_at(consumed) // (self.micro_batch_size * self.data_parallel_size)

    def micro_batch(self, consumed: int, index: int, rank: int) -> tuple[int, int]:
        """Return (first sample, number of samples) of a rank's micro-batch `index` in that step."""
        assert 0 <= rank < self.data_parallel_size, f"rank {rank} of {self.data_parallel_size}"
        assert 0 <= index < self.micro_batches_at(consumed), f"micro-batch {index} after {consumed} samples"
        size = self.micro_batch_size
        return consumed + (index * self.data_parallel_size + rank) * size, size

    def iterations(self, samples: int, *, consumed: int = 0) -> int:
        """Return the whole steps from sample `consumed` to `samples`; a partial global batch is not read."""
        return self._walk(consumed, samples=samples)[0]

    def samples_after(self, iterations: int, *, consumed: int = 0) -> int:
        """Return the samples consumed after `iterations` steps that begin at sample `consumed`."""
        return self._walk(consumed, iterations=iterations)[1]

    @property
    def _ramp(self) -> tuple[int, int, int]:
        """START, INCREMENT, SAMPLES."""
        return self.rampup or (self.global_batch_size, 1, 0)

    @property
    def _increments(self) -> int:
        start, increment, _ = self._ramp
        return (self.global_batch_size - start) // increment

    def _walk(
        self, consumed: int, *, samples: int | None = None, iterations: int | None = None
    ) -> tuple[int, int]:
        """Return (steps, samples consumed) at the last step within the limit; walks one stage at a time.

        The first step begins at sample `consumed`, which need not be the end of a step of this schedule.
        """
        steps, ramp_end = 0, self._ramp[2]
        while True:
            size = self.global_batch_size_at(consumed)
            limits = []
            if consumed < ramp_end:
                stage = consumed * self._increments // ramp_end
                stage_end = -(-(stage + 1) * ramp_end // self._increments)
                limits.append(-(-(stage_end - consumed) // size))
            if samples is not None:
                limits.append(max(0, samples - consumed) // size)
            if iterations is not None:
                limits.append(iterations - steps)
            taken = min(limits)
            steps, consumed = steps + taken, consumed + taken * size
            if taken == limits[-1]:  # the caller's limit, not the end of a stage
                return steps, consumed

    def _check_divisible(self, flag: str, shown: object, size: int, name: str = "") -> None:
        one_round = self.micro_batch_size * self.data_parallel_size
        if size % one_round:
            below, above = size // one_round * one_round, -(-size // one_round) * one_round
            nearest = f"{below} or {above}" if below else str(above)
            ranks = f"{self.data_parallel_size} data-parallel ranks"
            fix = f"a multiple of --micro-batch-size {self.micro_batch_size} × {ranks} = {one_round}"
            raise option_error(flag, shown, f"{name}{size} must be {fix}, such as {nearest}")
