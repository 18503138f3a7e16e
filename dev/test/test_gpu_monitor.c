// Tests the readings of a GPU (gpu_monitor.h) with functions of our own in place of NVML's. Between readings the
// energy is extrapolated. The energy never falls. A value that the GPU does not report is NAN, or 0 for throttle
// reasons.
#define GPU_MONITOR_SECONDS 0.1  // so that the test is short
#include "../../llmc/ranks/gpu_monitor.h"
#include "../../llmc/run/slow_ranks.h"
#include "lib/check.h"

static double fake_watts, fake_joules_from;  // W; the time at which the energy counter was 0
static double fake_joules_lump = 0.001;      // the energy counter grows by this many joules at a time
static int64_t fake_readings;
static bool fake_is_silent;  // the fake GPU reports no values

static int fake_init(void) { return 0; }

static int fake_device(const char *bus_id, void **device) {
    *device = &fake_watts;
    return strcmp(bus_id, "0000:01:00.0") == 0 ? 0 : 6;
}

static int fake_energy(void *device, unsigned long long *millijoules) {
    CHECK(device == &fake_watts, "the GPU's handle is passed to NVML");
    fake_readings++;
    const double joules = fake_watts * (seconds_now() - fake_joules_from);
    *millijoules = (unsigned long long)(1e3 * (joules - fmod(joules, fake_joules_lump)));
    return fake_is_silent ? 3 : 0;
}

static int fake_power(void *device, unsigned *milliwatts) {
    (void)device;
    *milliwatts = (unsigned)(1e3 * fake_watts);
    return fake_is_silent ? 3 : 0;
}

static int fake_clock(void *device, int type, unsigned *mhz) {
    (void)device;
    *mhz = 1755;
    return fake_is_silent || type != NVML_SM_CLOCK;
}

static int fake_temperature(void *device, int sensor, unsigned *celsius) {
    (void)device;
    *celsius = 61;
    return fake_is_silent || sensor != NVML_GPU_TEMPERATURE;
}

static int fake_throttle(void *device, unsigned long long *reasons) {
    (void)device;
    *reasons = 4;
    return fake_is_silent ? 3 : 0;
}

static GpuMonitor fake_monitor(void) {
    GpuMonitor m;
    memset(&m, 0, sizeof m);
    const Nvml nvml = {fake_init, fake_device, fake_energy, fake_power, fake_clock, fake_temperature, fake_throttle};
    m.nvml = nvml;
    return m;
}

static void sleep_seconds(double seconds) {
    const struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&t, NULL);
}

static void test_readings(void) {
    GpuMonitor m = fake_monitor();
    fake_watts = 500, fake_joules_from = seconds_now() - 10, fake_readings = 0;
    CHECK(gpu_monitor_start(&m, "0000:01:00.0"), "the monitor starts for a GPU that NVML knows");
    double before = 0;
    for (int i = 0; i < 50; i++) {  // 0.5 s
        const double earliest = 500 * (seconds_now() - fake_joules_from);
        const GpuReading r = gpu_monitor_read(&m);
        const double latest = 500 * (seconds_now() - fake_joules_from);
        CHECK(r.present && r.watts == 500 && r.sm_mhz == 1755 && r.celsius == 61 && r.throttle == 4,
              "reading %d has power, clock, temperature and throttle reasons of the fake GPU", i);
        CHECK(r.joules > earliest - 1 && r.joules < latest + 1 && r.joules >= before,
              "the energy is %g J after %g J; expected %g to %g J, within 1 J", r.joules, before, earliest, latest);
        before = r.joules;
        sleep_seconds(0.01);
    }
    CHECK(fake_readings >= 3 && fake_readings <= 12, "the GPU is read 3 to 12 times in half a second; found %lld",
          (long long)fake_readings);

    // The counter now has less energy than was already reported. The reported energy must not fall.
    fake_joules_from = seconds_now() - 9;
    sleep_seconds(0.25);
    CHECK(gpu_monitor_read(&m).joules >= before, "energy never falls");
    gpu_monitor_close(&m);
    const int64_t readings = fake_readings;
    sleep_seconds(0.25);
    CHECK(fake_readings == readings && !gpu_monitor_read(&m).present, "a closed monitor reads no more");
}

// The counter grows by 100 J at a time, and a step uses 5 J. Still, the energy of each step is about 5 J.
static void test_lumps(void) {
    GpuMonitor m = fake_monitor();
    fake_watts = 500, fake_joules_from = seconds_now() - 10, fake_joules_lump = 100;
    CHECK(gpu_monitor_start(&m, "0000:01:00.0"), "the monitor starts for a GPU that NVML knows");
    double before = gpu_monitor_read(&m).joules, at = seconds_now();
    const double first = before, first_at = at;
    for (int i = 0; i < 100; i++) {
        sleep_seconds(0.01);
        const double joules = gpu_monitor_read(&m).joules, now = seconds_now(), want = 500 * (now - at);
        CHECK(joules - before > 0.5 * want && joules - before < 1.5 * want,
              "step %d: the energy is %g J; expected about %g J", i, joules - before, want);
        before = joules, at = now;
    }
    CHECK(fabs(before - first - 500 * (at - first_at)) < 120, "the energy of all steps is %g J; expected about %g J",
          before - first, 500 * (at - first_at));
    gpu_monitor_close(&m);
    fake_joules_lump = 0.001;
}

static void test_silent(void) {
    GpuMonitor m = fake_monitor();
    fake_is_silent = true;
    CHECK(gpu_monitor_start(&m, "0000:01:00.0"), "the monitor starts for a GPU that reports no values");
    const GpuReading r = gpu_monitor_read(&m);
    CHECK(r.present && isnan(r.joules) && isnan(r.watts) && isnan(r.sm_mhz) && isnan(r.celsius) && r.throttle == 0,
          "values that the GPU does not report are NAN, and there are no throttle reasons");
    gpu_monitor_close(&m);
    fake_is_silent = false;
}

static void test_absent(void) {
    GpuMonitor m = fake_monitor();
    CHECK(!gpu_monitor_start(&m, "0000:02:00.0") && !gpu_monitor_read(&m).present,
          "the monitor does not start for a GPU that NVML does not know");
    gpu_monitor_close(&m);
    gpu_monitor_open(&m, "");
    CHECK(!gpu_monitor_read(&m).present, "a CPU has no readings");
    gpu_monitor_close(&m);
    Nvml nvml;
    CHECK(!nvml_load(&nvml, "libno-such-library.so.1"), "a missing library gives false, not an error");
    CHECK(!nvml_load(&nvml, "libm.so.6"), "a library without NVML's functions is refused");
}

static void test_slow_rank(void) {
    SlowRank s = {0, 0, 0};
    int named = 0, at = 0;
    for (int step = 1; step <= 60; step++) {  // step 10 is fast: the count begins again
        if (!slow_rank_count(&s, step == 10 ? 0.1 : 0.106, 0.1)) continue;
        named++, at = step;
    }
    CHECK(named == 1 && at == 30, "a rank that is 6%% slower is named once, after 20 steps in a row; %d times, step %d",
          named, at);
    bool any = false;
    for (int step = 0; step < 60; step++) any |= slow_rank_count(&s, 0.104, 0.1) || slow_rank_count(&s, 1e-3, 5e-4);
    CHECK(!any, "4%% and steps of less than 2 ms count for nothing");
    double values[] = {3, 1, 2, 9};
    CHECK(slow_rank_median(values, 4) == 2 && slow_rank_median(values, 2) == 1, "medians of 4 and of 2 numbers");
}

int main(void) {
    test_slow_rank();
    test_readings();
    test_lumps();
    test_silent();
    test_absent();
    return check_report();
}
