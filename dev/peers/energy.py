"""The energy counter of a GPU, read by NVML: the same counter as ours (llmc/ranks/gpu_monitor.h)."""
import ctypes


class EnergyCounter:
    """Reads how many joules a GPU has used. Without NVML, or without the counter, there is no reading: None."""

    def __init__(self, uuid, library="libnvidia-ml.so.1"):
        """`uuid` names the GPU as the driver does, such as GPU-9aa1c0de-..."""
        self.device = ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL(library)
            known = self.nvml.nvmlInit_v2() == 0 and self.nvml.nvmlDeviceGetHandleByUUID(
                uuid.encode(), ctypes.byref(self.device)) == 0
        except (OSError, AttributeError):  # no driver, or one that is too old
            known = False
        if not known:
            self.nvml = None

    def joules(self):
        millijoules = ctypes.c_ulonglong()
        if self.nvml is None or self.nvml.nvmlDeviceGetTotalEnergyConsumption(
                self.device, ctypes.byref(millijoules)) != 0:
            return None
        return millijoules.value * 1e-3
