"""CUPTI: what the real library is asked of each chip, and how samples become figures."""

import ctypes
from collections.abc import Sequence

import pytest

from longleaf.exporters._cupti import Cupti, MetricConfig, count_devices, find_library
from longleaf.exporters.cupti import COUNTERS, CuptiPm, ratios
from longleaf.exporters.source import SourceError


@pytest.fixture(scope="module")
def cupti() -> Cupti:
    try:
        return Cupti(find_library())
    except SourceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("chip", [b"GH100", b"GB202"])
def test_every_counter_fits_one_pass(cupti: Cupti, chip: bytes) -> None:
    """H200; RTX PRO 6000 Blackwell. The plan is made without a GPU."""
    config = MetricConfig(cupti, chip, tuple(COUNTERS.values()))
    assert len(config.image) > 500
    config.close()


def test_an_unknown_counter_and_a_plan_of_two_passes_are_refused(cupti: Cupti) -> None:
    with pytest.raises(SourceError, match="cuptiProfilerHostConfigAddMetrics: CUPTI_ERROR_INV"):
        MetricConfig(cupti, b"GH100", ["sm__no_such_counter.avg"])
    with pytest.raises(SourceError, match="need 2 passes, not one"):
        MetricConfig(cupti, b"GH100", ["sm__inst_executed_pipe_tensor.avg"])
    with pytest.raises(SourceError, match="cuptiProfilerHostInitialize"):
        MetricConfig(cupti, b"no such chip", tuple(COUNTERS.values()))


def test_without_a_driver_it_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(SourceError, match="CUDA driver: libcuda"):
            count_devices()
    else:
        pytest.skip("there is a driver")


class FakeSampler:
    """Tells what it is given, an answer a call, and the last one again."""

    def __init__(self, *answers: Sequence[Sequence[float]] | SourceError) -> None:
        self._answers = list(answers)
        self.closed = 0

    def samples(self) -> Sequence[Sequence[float]]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, SourceError):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


BUSY = [(10.0, 50.0, 20.0)]
FIGURES = {"tensor_active_ratio": 0.1, "dram_active_ratio": 0.5, "sm_active_ratio": 0.2}
UNKNOWN = SourceError("cuptiPmSamplingDecodeData: CUPTI_ERROR_UNKNOWN")


def test_figures_are_means_over_the_intervals() -> None:
    """Percent of tensor pipes, memory and SMs: two intervals of one length."""
    found = ratios([(0.0, 80.0, 100.0), (60.0, 40.0, 20.0)])
    assert found == {
        "tensor_active_ratio": pytest.approx(0.3),
        "dram_active_ratio": pytest.approx(0.6),
        "sm_active_ratio": pytest.approx(0.6),
    }
    assert ratios([]) == {}
    assert "dram_active_ratio" not in ratios([(10.0, float("nan"), 0.0)])


def test_a_gpu_that_counts_nothing_is_not_supported() -> None:
    samplers = {"0": FakeSampler(BUSY), "1": FakeSampler([])}
    source = CuptiPm(lambda: samplers, wait=0.1)
    assert set(source.open().values()) == {"not counted"}
    assert source.sample()["0"]["tensor_active_ratio"] == 0.1
    assert source.sample()["1"] == {}
    source.close()
    assert [sampler.closed for sampler in samplers.values()] == [1, 1]


def test_a_sample_waits_for_the_end_of_an_interval() -> None:
    source = CuptiPm(lambda: {"0": FakeSampler([], [], BUSY), "1": FakeSampler(BUSY, [])}, wait=0.1)
    assert set(source.open().values()) == {""}
    assert source.sample() == {"0": FIGURES, "1": {}}


def test_what_cannot_be_decoded_is_counted_anew(caplog: pytest.LogCaptureFixture) -> None:
    made: list[FakeSampler] = []

    def load() -> dict[str, FakeSampler]:
        made.append(FakeSampler(BUSY, UNKNOWN))
        return {"0": made[-1]}

    source = CuptiPm(load)
    source.open()
    assert [source.sample() for _ in range(3)] == [{"0": FIGURES}] * 3
    assert [sampler.closed for sampler in made] == [1, 1, 1, 0]
    assert caplog.messages == [f"cupti_pm counts anew: {UNKNOWN}"]


@pytest.mark.parametrize(
    ("answer", "why"), [(UNKNOWN, "CUPTI_ERROR_UNKNOWN"), ([], "nothing was counted in 0.1 s")]
)
def test_what_can_never_be_decoded_is_said(
    answer: Sequence[Sequence[float]] | SourceError, why: str
) -> None:
    source = CuptiPm(lambda: {"0": FakeSampler(answer)}, wait=0.1)
    with pytest.raises(SourceError, match=why):
        source.open()
