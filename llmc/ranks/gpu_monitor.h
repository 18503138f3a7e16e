// Energy, power, clock, temperature and throttle reasons of this rank's GPU, read by NVML while the run goes on.
// NVML (libnvidia-ml.so.1, part of the driver) is loaded at run time: without it there are no readings.
//
// A thread reads the GPU twice a second, since one reading may take longer than a short step. Between readings the
// energy is extrapolated by the power. It is corrected towards the GPU's energy counter within about a second, which
// also smooths the counter's jumps. So the energy of a short step follows from the mean power around it, and the energy
// of many steps is about what the counter shows. The counter of an H200 lags by about 0.5 s, so the energy of a run's
// first step includes some that the start-up used.
#ifndef LLMC_GPU_MONITOR_H
#define LLMC_GPU_MONITOR_H

#include <dlfcn.h>
#include <math.h>
#include <signal.h>

#include "../base/utils.h"

#ifndef GPU_MONITOR_SECONDS
#define GPU_MONITOR_SECONDS 0.5  // between readings
#endif
#define GPU_MONITOR_SLEW_SECONDS 1.0

// One reading. A value is NAN if the GPU does not report it.
typedef struct {
    bool present;       // false: there is no reading (no NVML, or a CPU)
    double joules;      // used since some moment before the run
    double watts;       // by NVML's manual, the mean of the last second; on A100 and older GPUs, the current power
    double sm_mhz;      // clock of the SMs
    double celsius;     // temperature of the GPU
    uint64_t throttle;  // reasons why the clock is below its maximum: bits that gpu_throttle_name() names
} GpuReading;

// NVML's functions that are used. Each returns 0 on success. `device` is an nvmlDevice_t.
typedef struct {
    int (*init)(void);
    int (*device_by_pci_bus_id)(const char *bus_id, void **device);
    int (*energy)(void *device, unsigned long long *millijoules);
    int (*power)(void *device, unsigned *milliwatts);
    int (*clock)(void *device, int type, unsigned *mhz);
    int (*temperature)(void *device, int sensor, unsigned *celsius);
    int (*throttle)(void *device, unsigned long long *reasons);
} Nvml;

enum { NVML_SM_CLOCK = 1, NVML_GPU_TEMPERATURE = 0 };  // nvmlClockType_t, nvmlTemperatureSensors_t

typedef struct {
    Nvml nvml;
    void *device;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t ends;
    bool running, ending;
    GpuReading latest;
    double read_at;      // seconds_now() at which latest.joules was read
    double reported;     // the last finite joules that gpu_monitor_read returned: later ones are not less
    double reported_at;  // seconds_now() of that read; 0: there was none
} GpuMonitor;

// Names of the bits of GpuReading.throttle (nvmlClocksEventReasons), the lowest first. Idle clocks (bit 0), application
// clocks that a user set (bit 1) and display clocks (bit 8) are no throttling: they have no name.
static inline const char *gpu_throttle_name(int bit) {
    static const char *const names[] = {
        "", "", "power cap", "hardware slowdown", "sync boost", "thermal", "hardware thermal", "power brake", ""};
    return bit < (int)(sizeof names / sizeof names[0]) ? names[bit] : "";
}

// Writes the names of throttle reasons, separated by commas; "" if there are none.
static inline void gpu_throttle_text(char *out, size_t capacity, uint64_t reasons) {
    *out = '\0';
    for (int bit = 0; bit < 64; bit++)
        if (reasons >> bit & 1 && *gpu_throttle_name(bit))
            format_checked(out + strlen(out), capacity - strlen(out), "%s%s", *out ? ", " : "", gpu_throttle_name(bit));
}

// Loads NVML's functions. False if the library or one of these functions is missing.
static inline bool nvml_load(Nvml *n, const char *library) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return false;
    const struct {
        void **function;
        const char *name;
    } rows[] = {{(void **)&n->init, "nvmlInit_v2"},
                {(void **)&n->device_by_pci_bus_id, "nvmlDeviceGetHandleByPciBusId_v2"},
                {(void **)&n->energy, "nvmlDeviceGetTotalEnergyConsumption"},
                {(void **)&n->power, "nvmlDeviceGetPowerUsage"},
                {(void **)&n->clock, "nvmlDeviceGetClockInfo"},
                {(void **)&n->temperature, "nvmlDeviceGetTemperature"},
                {(void **)&n->throttle, "nvmlDeviceGetCurrentClocksThrottleReasons"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (!(*rows[i].function = dlsym(handle, rows[i].name))) return false;
    return true;
}

// Reads the GPU. Values that it does not report become NAN, or 0 for `throttle`. *read_at: seconds_now() at which the
// energy was read; the other calls may take milliseconds.
static inline GpuReading gpu_reading(const Nvml *n, void *device, double *read_at) {
    unsigned long long energy = 0, throttle = 0;
    unsigned power = 0, clock = 0, temperature = 0;
    GpuReading r = {true, (double)NAN, (double)NAN, (double)NAN, (double)NAN, 0};
    if (n->energy(device, &energy) == 0) r.joules = (double)energy * 1e-3;
    *read_at = seconds_now();
    if (n->power(device, &power) == 0) r.watts = power * 1e-3;
    if (n->clock(device, NVML_SM_CLOCK, &clock) == 0) r.sm_mhz = clock;
    if (n->temperature(device, NVML_GPU_TEMPERATURE, &temperature) == 0) r.celsius = temperature;
    if (n->throttle(device, &throttle) == 0) r.throttle = throttle;
    return r;
}

// Reads the GPU and stores the result.
static inline void gpu_monitor_update(GpuMonitor *m) {
    double read_at;
    const GpuReading r = gpu_reading(&m->nvml, m->device, &read_at);
    pthread_mutex_lock(&m->mutex);
    m->latest = r, m->read_at = read_at;
    pthread_mutex_unlock(&m->mutex);
}

static inline void *gpu_monitor_run(void *monitor) {
    GpuMonitor *m = (GpuMonitor *)monitor;
    while (!thread_sleep(GPU_MONITOR_SECONDS, &m->mutex, &m->ends, &m->ending)) gpu_monitor_update(m);
    return NULL;
}

// Starts the thread that reads a GPU. Call it after nvml_load. Returns false if NVML cannot start or does not know the
// GPU.
static inline bool gpu_monitor_start(GpuMonitor *m, const char *pci_bus_id) {
    pthread_condattr_t clock;
    sigset_t all, before;
    if (m->nvml.init() || m->nvml.device_by_pci_bus_id(pci_bus_id, &m->device)) return false;
    sigfillset(&all);  // signals are for the main thread
    if (pthread_condattr_init(&clock) || pthread_condattr_setclock(&clock, CLOCK_MONOTONIC) ||
        pthread_cond_init(&m->ends, &clock) || pthread_mutex_init(&m->mutex, NULL))
        die("cannot make the lock of the GPU monitor");
    gpu_monitor_update(m);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) || pthread_create(&m->thread, NULL, gpu_monitor_run, m) ||
        pthread_sigmask(SIG_SETMASK, &before, NULL))
        die("cannot start the thread of the GPU monitor");
    pthread_condattr_destroy(&clock);
    return m->running = true;
}

// Starts to read the GPU at pci_bus_id, as cudaDeviceGetPCIBusId gives it. Without NVML, or for "" (a CPU), there are
// no readings.
static inline void gpu_monitor_open(GpuMonitor *m, const char *pci_bus_id) {
    memset(m, 0, sizeof *m);
    if (*pci_bus_id && nvml_load(&m->nvml, "libnvidia-ml.so.1")) gpu_monitor_start(m, pci_bus_id);
}

// Returns the latest reading, with the energy extrapolated until now. `present` is false if there are no readings.
static inline GpuReading gpu_monitor_read(GpuMonitor *m) {
    GpuReading r = {};
    if (!m->running) return r;
    pthread_mutex_lock(&m->mutex);
    r = m->latest;
    const double now = seconds_now(), age = now - m->read_at;
    pthread_mutex_unlock(&m->mutex);
    if (!isfinite(r.joules)) return r;
    if (isfinite(r.watts)) r.joules += r.watts * age;
    if (isfinite(r.watts) && m->reported_at > 0) {
        const double passed = now - m->reported_at, expected = m->reported + r.watts * passed;
        r.joules = expected + (r.joules - expected) * (1 - exp(-passed / GPU_MONITOR_SLEW_SECONDS));
    }
    if (r.joules < m->reported) r.joules = m->reported;
    m->reported = r.joules, m->reported_at = now;
    return r;
}

static inline void gpu_monitor_close(GpuMonitor *m) {
    if (!m->running) return;
    pthread_mutex_lock(&m->mutex);
    m->ending = true;
    pthread_cond_signal(&m->ends);
    pthread_mutex_unlock(&m->mutex);
    pthread_join(m->thread, NULL);
    m->running = false;
}

#endif
