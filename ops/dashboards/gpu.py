"""GPU truth: what a GPU does, beside what is usually called its utilization."""

from ops.dashboards.panels import Board, Kind, Panel, Query, Row, series

_GPU = "{{instance}} {{gpu}}"

BOARD = Board(
    "longleaf-gpu",
    "Longleaf / GPU truth",
    "Tensor pipes, memory, residency and power side by side. A gap is a metric that this GPU "
    "cannot tell: it is not 0.",
    (
        Row(
            "What the GPU does",
            (
                Panel(
                    "Tensor pipes active",
                    "Share of cycles. High in prefill, low in decode at batch 1 by nature.",
                    "percentunit",
                    (series("longleaf_gpu_tensor_active_ratio", _GPU),),
                    width=6,
                    top=1,
                ),
                Panel(
                    "Memory active",
                    "Share of cycles in which device memory moves data: what decode should be.",
                    "percentunit",
                    (series("longleaf_gpu_dram_active_ratio", _GPU),),
                    width=6,
                    top=1,
                ),
                Panel(
                    "Resident (nvidia-smi's utilization)",
                    "Share of time in which some kernel is there, working or waiting. Near 1 with "
                    "the two beside it near 0 is a GPU that idles.",
                    "percentunit",
                    (series("longleaf_gpu_sm_resident_ratio", _GPU),),
                    width=6,
                    top=1,
                ),
                Panel(
                    "Power",
                    "Of the board. Idle tensor pipes and idle memory draw a fraction of the limit.",
                    "watt",
                    (
                        series("longleaf_gpu_power_watts", _GPU),
                        series("longleaf_gpu_power_limit_watts", f"limit {_GPU}"),
                    ),
                    width=6,
                ),
            ),
        ),
        Row(
            "Its means",
            (
                Panel(
                    "SMs with work",
                    "Share of the SMs, averaged over time: a kernel of 8 blocks keeps 6 % of 132.",
                    "percentunit",
                    (series("longleaf_gpu_sm_active_ratio", _GPU),),
                    width=6,
                    top=1,
                ),
                Panel(
                    "Clocks",
                    "A clock that falls under load lacks power or cooling.",
                    "hertz",
                    (
                        series("longleaf_gpu_sm_clock_hertz", f"SM {_GPU}"),
                        series("longleaf_gpu_memory_clock_hertz", f"memory {_GPU}"),
                    ),
                    width=6,
                ),
                Panel(
                    "Device memory",
                    "In use, and all of it.",
                    "bytes",
                    (
                        series("longleaf_gpu_memory_used_bytes", f"used {_GPU}"),
                        series("longleaf_gpu_memory_total_bytes", f"total {_GPU}"),
                    ),
                    width=6,
                ),
                Panel(
                    "PCIe",
                    "Without NVLink, tensor parallelism's all-reduces go here.",
                    "Bps",
                    (
                        series("longleaf_gpu_pcie_receive_bytes_per_second", f"in {_GPU}"),
                        series("longleaf_gpu_pcie_transmit_bytes_per_second", f"out {_GPU}"),
                    ),
                    width=6,
                ),
            ),
        ),
        Row(
            "What can be known",
            (
                Panel(
                    "Metrics by source",
                    "0: this source cannot tell this metric of every GPU; its log says why. Source "
                    "none: none that is asked is for it.",
                    "short",
                    (series("longleaf_gpu_metric_supported", "{{metric}} {{source}}"),),
                    Kind.TABLE,
                    width=12,
                ),
                Panel(
                    "GPUs",
                    "Name, UUID and driver.",
                    "short",
                    (series("longleaf_gpu_info", ""),),
                    Kind.TABLE,
                    width=6,
                ),
                Panel(
                    "Time of a sample",
                    "What observing costs the exporter: the last sample, all GPUs.",
                    "s",
                    (series("longleaf_gpu_sample_seconds", "{{instance}}"),),
                    width=6,
                ),
                Panel(
                    "GPUs that tell anything",
                    "0: a GPU of which no source tells anything any more: mostly it is lost.",
                    "short",
                    (series("longleaf_gpu_up", _GPU),),
                    width=12,
                ),
                Panel(
                    "Age of the last sample",
                    "Beyond 15 s, or three of the exporter's intervals, figures are withdrawn.",
                    "s",
                    (
                        Query(
                            "time() - longleaf_gpu_sample_timestamp_seconds"
                            '{namespace=~"$namespace"}',
                            "{{instance}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Five-minute means",
                    "What the alert `LongleafGpuResidentButIdle` compares.",
                    "percentunit",
                    (
                        series("longleaf:gpu_sm_resident:mean5m", f"resident {_GPU}"),
                        series("longleaf:gpu_tensor_active:mean5m", f"tensor {_GPU}"),
                        series("longleaf:gpu_dram_active:mean5m", f"memory {_GPU}"),
                    ),
                    top=1,
                ),
            ),
        ),
    ),
)
