// Tests how a process learns its rank and where the ranks meet (llmc/ranks/init_from.h), and which addresses the file
// of --init-from file:PATH lists (llmc/ranks/rendezvous.h). test_rendezvous.sh starts ranks.
#include "../../llmc/ranks/rendezvous.h"
#include "lib/check.h"
#include "lib/scratch.h"

enum { MANY_ADDRESSES = 20 };

static struct ifaddrs interfaces[2 * MANY_ADDRESSES];
static struct sockaddr_in interface_addresses[2 * MANY_ADDRESSES];

// Replaces libc's function: the host has MANY_ADDRESSES addresses 10.0.0.X, then as many 127.0.0.X.
int getifaddrs(struct ifaddrs **all) {
    for (uint32_t i = 0; i < 2 * MANY_ADDRESSES; i++) {
        const uint32_t network = i < MANY_ADDRESSES ? 10u << 24 : 127u << 24;
        interface_addresses[i].sin_family = AF_INET;
        interface_addresses[i].sin_addr.s_addr = htonl(network + 1 + i % MANY_ADDRESSES);
        interfaces[i].ifa_name = (char *)"eth0";
        interfaces[i].ifa_addr = (struct sockaddr *)&interface_addresses[i];
        interfaces[i].ifa_next = i + 1 < 2 * MANY_ADDRESSES ? &interfaces[i + 1] : NULL;
    }
    *all = interfaces;
    return 0;
}

void freeifaddrs(struct ifaddrs *all) { (void)all; }

static const char *const variables =
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMIX_RANK PMI_RANK PMI_SIZE MPI_LOCALNRANKS FLUX_JOB_SIZE "
    "FLUX_TASK_RANK MPI_LOCALRANKID SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST SLURM_JOB_ID "
    "SLURM_STEP_ID SLURM_RESTART_COUNT RANK WORLD_SIZE MASTER_ADDR MASTER_PORT";

// Returns how a process with the variables `environment` ("A=1 B=2") and the command line `arguments` joins the ranks.
static InitFrom join(const char *environment, const char *arguments) {
    char text[1024], *argv[16] = {(char *)"train_fp8"};
    int argc = 1;
    format_checked(text, sizeof text, "%s", variables);
    for (char *name = strtok(text, " "); name; name = strtok(NULL, " ")) unsetenv(name);
    format_checked(text, sizeof text, "%s", environment);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        char *equals = strchr(word, '=');
        *equals = 0;
        setenv(word, equals + 1, 1);
    }
    format_checked(text, sizeof text, "%s", arguments);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    return init_from(argc, argv);
}

static void check_first_host(void) {
    const char *const cases[][2] = {{"gpu1", "gpu1"},
                                    {"gpu1,gpu2", "gpu1"},
                                    {"gpu[03-05,9],login", "gpu03"},
                                    {"gpu[7,9]", "gpu7"},
                                    {"gpu[03-05,9]x,login", "gpu03x"},
                                    {"r[1-2]n[01-04]", "r1n01"},
                                    {"a-b[10-11].c-d", "a-b10.c-d"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char host[64];
        init_first_host(cases[i][0], host, sizeof host);
        CHECK(strcmp(host, cases[i][1]) == 0, "%s begins with host %s; found %s", cases[i][0], cases[i][1], host);
    }
}

static void check_environment(void) {
    InitFrom i = join("", "tiny");
    CHECK(i.kind == INIT_ONE && i.world == 1 && i.rank == 0 && i.timeout == INIT_TIMEOUT_SECONDS,
          "without variables there is one rank");
    i = join("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1", "tiny");
    CHECK(i.kind == INIT_MPI, "mpirun's variables mean MPI");
    i = join("PMIX_RANK=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=a", "tiny");
    CHECK(i.kind == INIT_MPI, "variables of srun --mpi=pmix mean MPI");
    i = join("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NODELIST=a[2-3] SLURM_JOB_ID=17 SLURM_STEP_ID=2",
             "tiny");
    CHECK(i.kind == INIT_TCP && i.world == 3 && i.rank == 1 && strcmp(i.place, "a2") == 0,
          "srun's variables mean TCP, with rank 0 on the first node");
    CHECK(strcmp(i.job, "slurm 17.2.0") == 0 && i.port >= 15000 && i.port < 31000,
          "srun's variables give a job name and a port from 15000 to 30999; found %s, port %d", i.job, i.port);
    const int port = i.port;
    i = join("SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NODELIST=a[2-3] SLURM_JOB_ID=17 SLURM_STEP_ID=2 "
             "SLURM_RESTART_COUNT=1",
             "--init-from slurm");
    CHECK(i.port == port && strcmp(i.job, "slurm 17.2.1") == 0,
          "a requeued job has another name, and keeps its port; found %s", i.job);
    i = join("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NODELIST=a SLURM_JOB_ID=18 SLURM_STEP_ID=2", "tiny");
    CHECK(i.port != port, "jobs 17 and 18 have different ports");
    i = join("RANK=1 WORLD_SIZE=2 MASTER_ADDR=node MASTER_PORT=29500", "tiny");
    CHECK(i.kind == INIT_TCP && i.rank == 1 && i.world == 2 && i.port == 29500 && strcmp(i.place, "node") == 0,
          "PyTorch's variables mean TCP");
    i = join("RANK=1 WORLD_SIZE=2", "tiny");
    CHECK(i.kind == INIT_ONE && i.world == 1, "without MASTER_ADDR, PyTorch's variables mean one rank");
}

// The largest number of ranks that any launcher speaks of is noted, and one of its ranks reports it.
static void check_launchers(void) {
    const struct {
        const char *environment, *says;
        int64_t launched;
        bool speaks;
    } cases[] = {{"", "", 0, false},
                 {"PMI_SIZE=2 PMI_RANK=0", "PMI_SIZE=2", 2, true},
                 {"PMI_SIZE=2 PMI_RANK=1", "PMI_SIZE=2", 2, false},
                 {"PMIX_RANK=3", "PMIX_RANK=3", 4, false},
                 {"PMIX_RANK=0", "PMIX_RANK=0", 2, true},
                 {"PMIX_RANK=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", "SLURM_STEP_NUM_TASKS=1", 1, true},
                 {"PMI_SIZE=2", "PMI_SIZE=2", 2, true},
                 {"MPI_LOCALNRANKS=2 MPI_LOCALRANKID=0", "MPI_LOCALNRANKS=2", 2, true},
                 {"OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=9",
                  "OMPI_COMM_WORLD_SIZE=4", 4, true},
                 {"PMIX_RANK=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=9", "SLURM_STEP_NUM_TASKS=9", 9, true},
                 {"SLURM_PROCID=0 SLURM_NTASKS=9", "", 0, false},
                 {"FLUX_JOB_SIZE=2 FLUX_TASK_RANK=1", "FLUX_JOB_SIZE=2", 2, false},
                 {"WORLD_SIZE=8", "", 0, false}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const InitFrom i = join(cases[k].environment, "tiny --init-from mpi");
        CHECK(i.launched == cases[k].launched && i.speaks == cases[k].speaks && !strcmp(i.launcher, cases[k].says),
              "\"%s\": %lld ranks by %s; found %lld by %s", cases[k].environment, (long long)cases[k].launched,
              cases[k].says, (long long)i.launched, i.launcher);
    }
    const InitFrom i = join("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NODELIST=a SLURM_STEP_ID=5 "
                            "SLURM_JOB_ID=9223372036854775807",
                            "tiny");
    CHECK(i.port >= 15000 && i.port < 31000, "the largest job id gives port %d", i.port);
}

static void check_arguments(void) {
    InitFrom i = join("RANK=3 WORLD_SIZE=4", "tiny --init-from file:/shared/a --init-timeout=7");
    CHECK(i.kind == INIT_FILE && i.rank == 3 && i.world == 4 && i.timeout == 7 && strcmp(i.place, "/shared/a") == 0,
          "--init-from file: gives the file, and RANK and WORLD_SIZE the rank");
    i = join("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2", "--init-from=tcp:[fe80::1]:80 --json");
    CHECK(i.kind == INIT_TCP && i.rank == 2 && i.port == 80 && strcmp(i.place, "fe80::1") == 0,
          "--init-from tcp: takes an IPv6 address in brackets; found %s", i.place);
    i = join("RANK=0 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=9", "--init-from tcp:a:80");
    CHECK(i.rank == 0 && i.world == 2, "RANK and WORLD_SIZE come before Slurm's variables");
    i = join("RANK=0 WORLD_SIZE=2", "--init-from tcp:a:80 --init-from tcp:b:81");
    CHECK(i.port == 81 && strcmp(i.place, "b") == 0, "the last of two --init-from counts");
    i = join("", "--init-from mpi");
    CHECK(i.kind == INIT_MPI, "--init-from mpi means MPI");
    i = join("RANK=0 WORLD_SIZE=1", "--init-from tcp:a:80");
    CHECK(i.kind == INIT_ONE, "with WORLD_SIZE=1 the rank needs no connection");
}

// Ranks on rank 0's host use the loopback addresses in the file. Ranks on other hosts use the other addresses. The file
// lists at most MEET_ADDRESSES of each kind, so that many addresses of one kind do not push out the other kind.
static void check_addresses(void) {
    const InitFrom init = join("RANK=0 WORLD_SIZE=2", "--init-from file:/shared/a");
    RankCard card = meet_card(&init, CARD_RANK);
    MeetFile file;
    int loopback = 0;
    scratch_create();
    meet_random_token(card.token);
    meet_file_write(scratch_path("meet"), &card, 1234);
    CHECK(meet_file_read(scratch_path("meet"), &file) && file.port == 1234, "the file can be read");
    for (int64_t i = 0; i < file.num_addresses; i++) loopback += address_is_loopback(file.addresses[i]);
    CHECK(loopback == MEET_ADDRESSES && file.num_addresses == 2 * MEET_ADDRESSES,
          "of a host with 20 addresses of each kind, a reader gets 16 of each; found %d loopback addresses of %lld",
          loopback, (long long)file.num_addresses);
    scratch_remove();
}

int main(void) {
    check_first_host();
    check_environment();
    check_launchers();
    check_arguments();
    check_addresses();
    return check_report();
}
