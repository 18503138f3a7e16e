"""The energy counter of a GPU, read by NVML: the same counter as ours (llmc/ranks/gpu_monitor.h)."""
import ctypes

# The counter of an H200 lags by about 0.5 s and grows every 0.1 s. So this long passes before the counted steps, which
# must take as long themselves.
SETTLE_SECONDS = 2.0


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


class StepEnergy:
    """The mean energy of the steps after `warm_up` that begin SETTLE_SECONDS after the second (the first compiles)."""

    def __init__(self, counter, warm_up):
        self.counter, self.warm_up, self.before, self.first = counter, warm_up, None, 0

    def begin_step(self, times):
        """Call this before each step. `times`: the seconds of the steps before it."""
        if self.before is None and len(times) >= self.warm_up and sum(times[1:]) >= SETTLE_SECONDS:
            self.before, self.first = self.counter.joules(), len(times)

    def joules_per_step(self, times):
        """Call this after the last step. None: the counter is not known, or there are too few steps."""
        after = self.counter.joules()
        if self.before is None or after is None or sum(times[self.first:]) < SETTLE_SECONDS:
            return None
        return (after - self.before) / (len(times) - self.first)
