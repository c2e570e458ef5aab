"""CUPTI 13's PM sampling through ctypes: cupti_pmsampling.h and cupti_profiler_host.h."""

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, cast

from longleaf.exporters.source import SourceError

_LIBRARY = "libcupti.so.13"
_BESIDE = ("libnvperf_host.so", "libnvperf_target.so")
_PM_SAMPLING = 1
_TIME_INTERVAL = 1
_KEEP_OLDEST = 0
"""Its other mode overwrites what is being decoded: decoding while it counted gave nothing at all,
or CUPTI_ERROR_UNKNOWN, of an H200 that was busy.
"""
_INTERVAL_NANOSECONDS = 100_000_000
"""The exporter's shortest interval. To evaluate one such sample takes about 2 ms."""
_MOST_SAMPLES = 640
"""A minute of them, the exporter's longest interval, and some; 16 KiB of memory each."""
_BUFFER_BYTES = _MOST_SAMPLES * (16 << 10)
_COUNTER_DATA_FULL = 1

_Struct = type[ctypes.Structure]


def _parameters(name: str, *fields: tuple[str, Any]) -> _Struct:
    """A CUPTI parameter structure: its size and a reserved pointer come first."""
    head = (("struct_size", c_size_t), ("private", c_void_p))
    return cast("_Struct", type(name, (ctypes.Structure,), {"_fields_": (*head, *fields)}))


_Initialize = _parameters("Initialize")
_ChipName = _parameters("ChipName", ("device", c_size_t), ("chip", c_char_p))
_Availability = _parameters(
    "Availability", ("device", c_size_t), ("size", c_size_t), ("image", c_void_p)
)
_HostInitialize = _parameters(
    "HostInitialize",
    *(("kind", c_int), ("chip", c_char_p), ("availability", c_void_p), ("host", c_void_p)),
)
_Host = _parameters("Host", ("host", c_void_p))
_AddMetrics = _parameters(
    "AddMetrics", ("host", c_void_p), ("names", c_void_p), ("count", c_size_t)
)
_ConfigSize = _parameters("ConfigSize", ("host", c_void_p), ("size", c_size_t))
_Config = _parameters("Config", ("host", c_void_p), ("size", c_size_t), ("image", c_void_p))
_Passes = _parameters("Passes", ("size", c_size_t), ("image", c_void_p), ("passes", c_size_t))
_Evaluate = _parameters(
    "Evaluate",
    *(("host", c_void_p), ("data", c_void_p), ("size", c_size_t), ("sample", c_size_t)),
    *(("names", c_void_p), ("count", c_size_t), ("values", c_void_p)),
)
_Enable = _parameters("Enable", ("device", c_size_t), ("sampler", c_void_p))
_Sampler = _parameters("Sampler", ("sampler", c_void_p))
_SetConfig = _parameters(
    "SetConfig",
    *(("sampler", c_void_p), ("size", c_size_t), ("image", c_void_p), ("buffer", c_size_t)),
    *(("interval", c_uint64), ("trigger", c_int), ("append", c_int)),
)
_DataSize = _parameters(
    "DataSize",
    *(("sampler", c_void_p), ("names", c_void_p), ("count", c_size_t)),
    *(("most", c_uint32), ("size", c_size_t)),
)
_DataInitialize = _parameters(
    "DataInitialize", ("sampler", c_void_p), ("size", c_size_t), ("data", c_void_p)
)
_Decode = _parameters(
    "Decode",
    *(("sampler", c_void_p), ("data", c_void_p), ("size", c_size_t)),
    *(("stopped", c_int), ("overflow", c_uint8)),
)
_DataInfo = _parameters(
    "DataInfo",
    *(("data", c_void_p), ("size", c_size_t)),
    *(("total", c_size_t), ("populated", c_size_t), ("completed", c_size_t)),
)


def find_library() -> Path:
    """CUPTI 13 of the package nvidia-cuda-cupti or of a CUDA toolkit; ``SourceError`` if none."""
    spec = importlib.util.find_spec("nvidia")
    folders = [
        Path(place) / "cu13/lib" for place in (spec and spec.submodule_search_locations) or ()
    ]
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            folders += [Path(home) / "extras/CUPTI/lib64", Path(home) / "lib64"]
    for folder in folders:
        if (folder / _LIBRARY).exists():
            return folder / _LIBRARY
    raise SourceError(f"{_LIBRARY} is not there (pip install nvidia-cuda-cupti, or CUDA 13)")


class Cupti:
    """The library; every call is checked."""

    def __init__(self, path: Path) -> None:
        try:
            for name in _BESIDE:
                if (path.parent / name).exists():
                    ctypes.CDLL(str(path.parent / name), mode=ctypes.RTLD_GLOBAL)
            self._cupti = ctypes.CDLL(str(path))
        except OSError as error:
            raise SourceError(f"CUPTI: {error}") from error

    def initialize(self) -> None:
        """Load CUPTI's profiler; the CUDA driver is initialized already."""
        self.call("cuptiProfilerInitialize", _Initialize())

    def call(self, function: str, parameters: ctypes.Structure) -> None:
        """Raise ``SourceError`` unless the function succeeds."""
        last = type(parameters)._fields_[-1][0]
        field = getattr(type(parameters), last)
        parameters.struct_size = field.offset + field.size
        status = getattr(self._cupti, function)(byref(parameters))
        if status:
            text = c_char_p()
            self._cupti.cuptiGetResultString(status, byref(text))
            said = text.value.decode() if text.value else status
            raise SourceError(f"{function}: {said}")


def count_devices() -> int:
    """CUDA devices in NVML's order, the driver initialized."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SourceError(f"CUDA driver: {error}") from error
    count = c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(byref(count))
    if status or not count.value:
        raise SourceError(f"CUDA driver: no device (status {status})")
    return count.value


class MetricConfig:
    """What one chip must count for some metrics, in one pass."""

    def __init__(
        self, cupti: Cupti, chip: bytes, metrics: Sequence[str], availability: Any = None
    ) -> None:
        self._cupti = cupti
        self.names = (c_char_p * len(metrics))(*(name.encode() for name in metrics))
        host = _HostInitialize(kind=_PM_SAMPLING, chip=chip, availability=_address(availability))
        cupti.call("cuptiProfilerHostInitialize", host)
        self.host = host.host
        try:
            self.image = self._build()
        except SourceError:
            self.close()
            raise

    def _build(self) -> ctypes.Array[c_uint8]:
        names, count = _address(self.names), len(self.names)
        self._cupti.call(
            "cuptiProfilerHostConfigAddMetrics",
            _AddMetrics(host=self.host, names=names, count=count),
        )
        size = _ConfigSize(host=self.host)
        self._cupti.call("cuptiProfilerHostGetConfigImageSize", size)
        image = _buffer(size.size)
        config = _Config(host=self.host, size=len(image), image=_address(image))
        self._cupti.call("cuptiProfilerHostGetConfigImage", config)
        passes = _Passes(size=len(image), image=_address(image))
        self._cupti.call("cuptiProfilerHostGetNumOfPasses", passes)
        if passes.passes != 1:
            raise SourceError(f"CUPTI: these metrics need {passes.passes} passes, not one")
        return image

    def close(self) -> None:
        """Give the host object back."""
        self._cupti.call("cuptiProfilerHostDeinitialize", _Host(host=self.host))


class DeviceSampler:
    """Samples one device's counters from now on."""

    def __init__(self, cupti: Cupti, device: int, metrics: Sequence[str]) -> None:
        self._cupti = cupti
        chip = _ChipName(device=device)
        cupti.call("cuptiDeviceGetChipName", chip)
        available = _Availability(device=device)
        cupti.call("cuptiPmSamplingGetCounterAvailability", available)
        image = _buffer(available.size)
        available.image = _address(image)
        cupti.call("cuptiPmSamplingGetCounterAvailability", available)
        config = self._config = MetricConfig(cupti, chip.chip, metrics, image)
        enable = _Enable(device=device)
        try:
            cupti.call("cuptiPmSamplingEnable", enable)
        except SourceError:
            config.close()
            raise
        self._sampler = enable.sampler
        try:
            self._data = self._start()
        except SourceError:
            self._disable()
            raise

    def _start(self) -> ctypes.Array[c_uint8]:
        """Configure and begin; returns the buffer that samples are decoded to."""
        cupti, config = self._cupti, self._config
        cupti.call(
            "cuptiPmSamplingSetConfig",
            _SetConfig(
                sampler=self._sampler,
                size=len(config.image),
                image=_address(config.image),
                buffer=_BUFFER_BYTES,
                interval=_INTERVAL_NANOSECONDS,
                trigger=_TIME_INTERVAL,
                append=_KEEP_OLDEST,
            ),
        )
        size = _DataSize(
            sampler=self._sampler,
            names=_address(config.names),
            count=len(config.names),
            most=_MOST_SAMPLES,
        )
        cupti.call("cuptiPmSamplingGetCounterDataSize", size)
        cupti.call("cuptiPmSamplingStart", _Sampler(sampler=self._sampler))
        return _buffer(size.size)

    def samples(self) -> Sequence[Sequence[float]]:
        """Values, in the order of the metrics, of each interval since the last call.
        ``SourceError`` also where that was too long ago: from then on nothing is counted.
        """
        data, size = _address(self._data), len(self._data)
        self._cupti.call(
            "cuptiPmSamplingCounterDataImageInitialize",
            _DataInitialize(sampler=self._sampler, size=size, data=data),
        )
        decode = _Decode(sampler=self._sampler, data=data, size=size)
        self._cupti.call("cuptiPmSamplingDecodeData", decode)
        if decode.overflow or decode.stopped == _COUNTER_DATA_FULL:
            raise SourceError("CUPTI: not asked for so long that samples are lost")
        info = _DataInfo(data=data, size=size)
        self._cupti.call("cuptiPmSamplingGetCounterDataInfo", info)
        return [self._evaluate(index) for index in range(info.completed)]

    def _evaluate(self, index: int) -> Sequence[float]:
        names = self._config.names
        values = (ctypes.c_double * len(names))()
        self._cupti.call(
            "cuptiProfilerHostEvaluateToGpuValues",
            _Evaluate(
                host=self._config.host,
                data=_address(self._data),
                size=len(self._data),
                sample=index,
                names=_address(names),
                count=len(names),
                values=_address(values),
            ),
        )
        return list(values)

    def close(self) -> None:
        """Stop counting."""
        try:
            self._cupti.call("cuptiPmSamplingStop", _Sampler(sampler=self._sampler))
        finally:
            self._disable()

    def _disable(self) -> None:
        self._cupti.call("cuptiPmSamplingDisable", _Sampler(sampler=self._sampler))
        self._config.close()


def _buffer(size: int) -> ctypes.Array[c_uint8]:
    return (c_uint8 * size)()


def _address(array: Any) -> Any:
    return None if array is None else ctypes.cast(array, c_void_p)
