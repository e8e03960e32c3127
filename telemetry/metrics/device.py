"""Rows about devices (NVML); what a machine does not have has no series."""

from telemetry.metric import OPEN, Metric, unowned

_ON_DEVICE = {"device": OPEN}

ROWS = (
    Metric("inferd_device_utilization_ratio", "gauge", "Share of time in which a kernel ran.", unowned, _ON_DEVICE),
    Metric("inferd_device_clock_hertz", "gauge", "Clock now.", unowned, {**_ON_DEVICE, "clock": ("sm", "memory")}),
    Metric(
        "inferd_device_throttled",
        "gauge",
        "1 while the clock is held down, by reason.",
        unowned,
        {**_ON_DEVICE, "reason": ("power", "thermal", "hardware", "other")},
    ),
    Metric("inferd_device_power_watts", "gauge", "Power drawn.", unowned, _ON_DEVICE),
    Metric("inferd_device_temperature_celsius", "gauge", "Core temperature.", unowned, _ON_DEVICE),
    Metric(
        "inferd_device_ecc_errors",
        "counter",
        "Memory errors.",
        unowned,
        {**_ON_DEVICE, "kind": ("corrected", "uncorrected")},
    ),
    Metric(
        "inferd_device_link_bytes",
        "counter",
        "Traffic of the device's links.",
        unowned,
        {**_ON_DEVICE, "link": ("pcie", "nvlink"), "direction": ("rx", "tx")},
    ),
)
