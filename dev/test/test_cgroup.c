// Tests cgroup.h: the memory limit of a control group, in folders like those of both versions of cgroups.
#include "../../llmc/base/cgroup.h"
#include "lib/check.h"
#include "lib/scratch.h"

static void put(const char *folder, const char *name, const char *text) {
    scratch_file(scratch_path("%s", folder), name, text);
}

int main(void) {
    static const struct {
        const char *groups;  // the content of /proc/self/cgroup
        int64_t limit;
    } cases[] = {{"0::/a/b\n", 5000},        // b has "max", and the group above it a limit
                 {"0::/a/c\n", 4000},        // the smaller of c's and a's
                 {"0::/elsewhere\n", 9000},  // the path of the host, in a container whose own group is the root
                 {"0::/\n", 9000},
                 {"5:cpu,cpuacct:/small\n4:memory:/job/step\n0::/\n", 3000},
                 {"4:memory:/elsewhere\n", 7000},
                 {"1:cpu:/a/c\n", INT64_MAX},
                 {"0::\nnonsense\n:::\n\n", 9000},
                 {"", INT64_MAX}};
    scratch_create();
    put("fs", "memory.max", "9000\n"), put("fs/a", "memory.max", "5000\n");
    put("fs/a/b", "memory.max", "max\n"), put("fs/a/c", "memory.max", "4000\n");
    put("fs/memory", "memory.limit_in_bytes", "7000\n"), put("fs/memory/job", "memory.limit_in_bytes", "3000\n");
    put("fs/memory/job/step", "memory.limit_in_bytes", "9223372036854771712\n");
    put("fs/memory/small", "memory.limit_in_bytes", "1\n");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        put("proc", "cgroup", cases[i].groups);
        const int64_t limit = cgroup_memory_limit(scratch_path("proc/cgroup"), scratch_path("fs"));
        CHECK(limit == cases[i].limit, "the limit for \"%s\" is %lld; expected %lld", cases[i].groups, (long long)limit,
              (long long)cases[i].limit);
    }
    CHECK(cgroup_memory_limit(scratch_path("none"), scratch_path("fs")) == INT64_MAX, "no file of groups, no limit");
    scratch_remove();
    return check_report();
}
