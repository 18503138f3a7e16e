// The ranks of a run find each other: rank 0 listens, the others come to it, and all get the table of all ranks.
// Rank 0 listens at the address that all were given, or writes its address to a file that all can read. A connection
// that is not from a rank of this run is closed. The network must be trusted, as for NCCL and MPI: ranks know each
// other only by texts (a job's name, a token) that cross it unencrypted.
#ifndef LLMC_RENDEZVOUS_H
#define LLMC_RENDEZVOUS_H

#include <ifaddrs.h>
#include <math.h>
#include <sys/random.h>

#include "init_from.h"
#include "sockets.h"

#define MEET_MAGIC "train_fp8 rank 1"  // changes with the layout of RankCard
#define MEET_NEWS_SECONDS 10           // rank 0 says after this time whom it waits for

enum { MEET_TOKEN = 33, MEET_ADDRESSES = 16 };  // a file has at most MEET_ADDRESSES loopback and as many others

// A connection begins with a card of the process that opens it.
typedef enum { CARD_RANK, CARD_DATA, CARD_BEATS } CardKind;

typedef struct {
    char magic[24];
    int32_t kind, world, rank, pid;
    int32_t port;                     // at which the rank listens for the ranks above it
    char address[SOCKET_ADDRESS];     // as rank 0 sees it; "": rank 0 itself, or a rank that came by loopback
                                      // (meet_ask puts an address there)
    char host[64], boot[40];          // name of the host, and its boot id: both are equal on ranks of one host
    char job[64], token[MEET_TOKEN];  // InitFrom.job; a random text of the run, or "" before rank 0 has told one
} RankCard;

typedef enum { ANSWER_TABLE, ANSWER_OTHER_JOB, ANSWER_WRONG, ANSWER_ENDED } AnswerKind;

// Rank 0's answer to a card. The table follows ANSWER_TABLE.
typedef struct {
    int32_t kind, code;  // code: rank 0's exit status, in ANSWER_ENDED
    char text[1024];     // reason, for ANSWER_OTHER_JOB and ANSWER_WRONG
} Answer;

// A rank's state while the ranks find each other.
typedef struct {
    const InitFrom *init;
    RankCard *cards;     // [world] the cards known so far, this rank's included
    int *fds;            // [world] rank 0: connections to the ranks that came; -1: none
    int64_t missing;     // rank 0: number of ranks that have not come
    int listener;        // socket for connections of the ranks above this one (mesh.h)
    char problem[1024];  // a reason for which the run cannot start; "": none
    int code;            // the exit status for that problem
} Meeting;

static inline void meet_read_line(const char *path, char *out, size_t capacity) {
    FILE *f = fopen(path, "rb");
    if (f && fgets(out, (int)capacity, f)) out[strcspn(out, "\n")] = 0;
    if (f) fclose(f);
}

static inline void meet_random_token(char token[MEET_TOKEN]) {
    unsigned char bytes[(MEET_TOKEN - 1) / 2];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) die("getrandom: %s", strerror(errno));
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(token + 2 * i, 3, "%02x", bytes[i]);
}

static inline RankCard meet_card(const InitFrom *init, CardKind kind) {
    RankCard card;
    memset(&card, 0, sizeof card);
    format_checked(card.magic, sizeof card.magic, MEET_MAGIC);
    card.kind = kind, card.world = (int32_t)init->world, card.rank = (int32_t)init->rank, card.pid = (int32_t)getpid();
    format_checked(card.job, sizeof card.job, "%s", init->job);
    if (gethostname(card.host, sizeof card.host - 1)) format_checked(card.host, sizeof card.host, "unknown-host");
    meet_read_line("/proc/sys/kernel/random/boot_id", card.boot, sizeof card.boot);
    if (!*card.boot) format_checked(card.boot, sizeof card.boot, "unknown");  // the file of MeetFile needs a word
    return card;
}

static inline bool card_same_host(const RankCard *a, const RankCard *b) {
    return strcmp(a->host, b->host) == 0 && strcmp(a->boot, b->boot) == 0;
}

// True if the bytes are a card of this program, by their magic. Terminates all texts, so that they are safe to read.
static inline bool card_valid(RankCard *card) {
    card->magic[sizeof card->magic - 1] = card->address[SOCKET_ADDRESS - 1] = card->host[sizeof card->host - 1] = 0;
    card->boot[sizeof card->boot - 1] = card->job[sizeof card->job - 1] = card->token[MEET_TOKEN - 1] = 0;
    return strcmp(card->magic, MEET_MAGIC) == 0;
}

// Sends an answer without a table. A failure to send is ignored: the other rank sees that the connection ends.
UTILS_PRINTF(4, 5)
static inline void meet_answer(int fd, AnswerKind kind, int code, const char *format, ...) {
    Answer answer = {};
    va_list args;
    answer.kind = kind, answer.code = code;
    va_start(args, format);
    vsnprintf(answer.text, sizeof answer.text, format, args);
    va_end(args);
    socket_all(fd, true, &answer, sizeof answer, seconds_now() + 1);
}

// ---- the file of --init-from file:PATH: magic, token, job, host, boot id, process and port, then one address a line

typedef struct {
    char magic[24], token[MEET_TOKEN], job[64], host[64], boot[40];
    int pid, port;
    int64_t num_addresses;
    char addresses[2 * MEET_ADDRESSES][SOCKET_ADDRESS];
} MeetFile;

// Reads this file. Returns false if it cannot be read, or is not as meet_file_write writes it.
static inline bool meet_file_read(const char *path, MeetFile *file) {
    char line[128];
    memset(file, 0, sizeof *file);
    FILE *f = open_regular(path, 1 << 16);
    if (!f) return false;
    const bool good = fgets(line, sizeof line, f) && strcmp(line, MEET_MAGIC "\n") == 0 &&
                      fscanf(f, "token %32s\njob %63[^\n]\nhost %63s\nboot %39s\nprocess %d\nport %d\n", file->token,
                             file->job, file->host, file->boot, &file->pid, &file->port) == 6;
    while (good && file->num_addresses < 2 * MEET_ADDRESSES &&
           fscanf(f, "address %63s\n", file->addresses[file->num_addresses]) == 1)
        file->num_addresses++;
    fclose(f);
    if (strcmp(file->job, "none") == 0) file->job[0] = 0;
    return good && file->num_addresses;
}

// Writes numeric addresses of this host's interfaces, one a line; loopback addresses last, for ranks of this host. At
// most MEET_ADDRESSES of each kind, so that readers have room for both.
static inline void meet_write_addresses(FILE *f) {
    struct ifaddrs *all;
    char address[NI_MAXHOST];
    if (getifaddrs(&all)) die("getifaddrs: %s", strerror(errno));
    for (int loopback = 0; loopback <= 1; loopback++) {
        int written = 0;
        for (const struct ifaddrs *a = all; a && written < MEET_ADDRESSES; a = a->ifa_next) {
            const int family = a->ifa_addr ? a->ifa_addr->sa_family : AF_UNSPEC;
            const socklen_t bytes = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
            if ((family != AF_INET && family != AF_INET6) || strlen(a->ifa_name) > 32 ||
                getnameinfo(a->ifa_addr, bytes, address, sizeof address, NULL, 0, NI_NUMERICHOST))
                continue;
            // a '%' marks a link-local IPv6 address, which other hosts cannot use
            if (strchr(address, '%') || address_is_loopback(address) != loopback || strlen(address) >= SOCKET_ADDRESS)
                continue;
            fprintf(f, "address %s\n", address);
            written++;
        }
    }
    freeifaddrs(all);
}

// Connects to the rank 0 that wrote a file: if it is on this host, by loopback, else by its other addresses in turn.
// Returns -1, with the reason, if that fails.
static inline int meet_file_connect(const MeetFile *file, const RankCard *own, Failure *failure) {
    const bool here = strcmp(file->host, own->host) == 0 && strcmp(file->boot, own->boot) == 0;
    int fd = -1;
    fail(failure, "the file of --init-from lists no address of %s that this rank can use", file->host);
    for (int64_t i = 0; i < file->num_addresses && fd < 0; i++)
        if (here == address_is_loopback(file->addresses[i]))
            fd = socket_connect(file->addresses[i], file->port, failure);
    return fd;
}

// Dies if there is a file that is not of a run, or whose rank 0 still listens. Warns of a file that an earlier run
// left: meet_file_write replaces it.
static inline void meet_file_check(const char *path, const RankCard *own) {
    MeetFile file;
    Failure failure;
    if (access(path, F_OK)) return;
    if (!meet_file_read(path, &file))
        die("--init-from file:%s: the file exists and cannot be read as one that rank 0 of a run wrote; give the path "
            "of a new file",
            path);
    const int fd = meet_file_connect(&file, own, &failure);
    if (fd >= 0)
        die("--init-from file:%s: another run seems to use the file: something listens where its rank 0 on %s (process "
            "%d) waited; give each run a file of its own, or remove the file if that run has ended",
            path, file.host, file.pid);
    warn("--init-from file:%s: a run on %s that does not answer left the file; it is replaced", path, file.host);
}

// Writes the file under another name, and renames it, so that no rank reads half of it.
static inline void meet_file_write(const char *path, const RankCard *own, int port) {
    char temporary[PATH_CAPACITY + 64];
    format_checked(temporary, sizeof temporary, "%s.%.60s", path, own->token);
    const int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);  // others must not read the token
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    if (!f) die("--init-from file:%s: cannot write %s: %s", path, temporary, strerror(errno));
    fprintf(f, "%s\ntoken %s\njob %s\nhost %s\nboot %s\nprocess %d\nport %d\n", MEET_MAGIC, own->token,
            *own->job ? own->job : "none", own->host, own->boot, own->pid, port);
    meet_write_addresses(f);
    if (fflush(f) || ferror(f) || fclose(f) || rename(temporary, path)) {
        const int error = errno;
        unlink(temporary);
        die("--init-from file:%s: cannot write it: %s", path, strerror(error));
    }
}

// The file that a signal removes while rank 0 waits; "": none.
static inline char *meet_signal_file(void) {
    static char path[PATH_CAPACITY];
    return path;
}

static inline void meet_on_signal(int number) {
    unlink(meet_signal_file());
    signal(number, SIG_DFL);
    raise(number);
}

// From now on SIGINT, SIGTERM and SIGHUP remove the file at `path` before they end this process; "": they only end it.
// A signal that is ignored stays so.
static inline void meet_guard_file(const char *path) {
    const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    format_checked(meet_signal_file(), PATH_CAPACITY, "%s", path);
    for (int i = 0; i < 3; i++)
        if (signal(numbers[i], *path ? meet_on_signal : SIG_DFL) == SIG_IGN) signal(numbers[i], SIG_IGN);
}

// ---- rank 0

// True if the file of --init-from file:PATH is still this run's.
static inline bool meet_owns_file(const Meeting *m) {
    MeetFile file;
    return meet_file_read(m->init->place, &file) && strcmp(file.token, m->cards[0].token) == 0;
}

// Lists the ranks that have not come: "1, 5, 6", or the first 8 of them and the number of the others, "... and 9 more".
static inline void meet_missing(const Meeting *m, char *out, size_t capacity) {
    int64_t listed = 0, n = 0;
    out[0] = 0;
    for (int64_t r = 1; r < m->init->world && listed < 8; r++) {
        if (m->fds[r] >= 0) continue;
        n += snprintf(out + n, capacity - (size_t)n, "%s%lld", listed++ ? ", " : "", (long long)r);
    }
    if (m->missing > listed)
        snprintf(out + n, capacity - (size_t)n, " and %lld more", (long long)(m->missing - listed));
}

// Decides about a card that has come to rank 0 (DoorAdmits). Refuses a card of another job. A card of this job that
// does not suit the run sets m->problem.
static inline bool meet_admit(void *context, int fd, const void *hello) {
    Meeting *m = (Meeting *)context;
    const RankCard *own = &m->cards[0];
    RankCard card;
    memcpy(&card, hello, sizeof card);
    if (!card_valid(&card)) return false;
    if (card.kind != CARD_RANK || strcmp(card.job, own->job) || strcmp(card.token, own->token)) {
        meet_answer(fd, ANSWER_OTHER_JOB, 0, "rank 0 of another job listens there (%s, process %d)", own->host,
                    own->pid);
        return false;
    }
    const int64_t world = m->init->world;
    m->code = EXIT_USAGE;
    if (card.world != world || card.rank < 1 || card.rank >= world)
        format_checked(m->problem, sizeof m->problem,
                       "rank %d on %s (process %d) was started as one of %d ranks, and rank 0 as one of %lld",
                       card.rank, card.host, card.pid, card.world, (long long)world);
    else if (m->fds[card.rank] >= 0) {
        m->code = EXIT_LOST;  // a rank of an earlier start may have come: another start may succeed
        format_checked(
            m->problem, sizeof m->problem,
            "rank %d came twice, from %s (process %d) and %s (process %d): two processes have one rank, or two "
            "jobs meet at one place; give each job a place of its own",
            card.rank, m->cards[card.rank].host, m->cards[card.rank].pid, card.host, card.pid);
    }
    if (*m->problem) {
        meet_answer(fd, ANSWER_WRONG, m->code, "%s", m->problem);
        return false;
    }
    socket_address(fd, false, card.address);
    if (address_is_loopback(card.address)) card.address[0] = 0;
    m->cards[card.rank] = card, m->fds[card.rank] = fd;
    m->missing--;
    return true;
}

// Ends the run on rank 0 with the error m->problem. The ranks that came end without a message of their own.
static inline void meet_fail(const Meeting *m) {
    for (int64_t r = 1; r < m->init->world; r++)
        if (m->fds[r] >= 0) meet_answer(m->fds[r], ANSWER_ENDED, m->code, "rank 0 ended the start");
    if (m->init->kind == INIT_FILE && meet_owns_file(m)) unlink(m->init->place);
    die_with(m->code, "%s", m->problem);
}

// Returns a rank that came and whose connection has broken since; 0: there is none.
static inline int64_t meet_left(const Meeting *m) {
    char byte;
    for (int64_t r = 1; r < m->init->world; r++)
        if (m->fds[r] >= 0 && socket_some(m->fds[r], false, &byte, 1) < 0) return r;
    return 0;
}

// Looks for a reason to end the start, after `waited` seconds of it. Sets m->problem and m->code if it finds one.
static inline void meet_find_problem(Meeting *m, const Door *door, const char *where, double waited) {
    const InitFrom *init = m->init;
    const int64_t left = meet_left(m);
    char missing[128];
    meet_missing(m, missing, sizeof missing);
    m->code = EXIT_LOST;
    if (left)
        format_checked(m->problem, sizeof m->problem, "rank %lld on %s ended or was lost before all ranks had come",
                       (long long)left, m->cards[left].host);
    else if (init->kind == INIT_FILE && !meet_owns_file(m))
        format_checked(
            m->problem, sizeof m->problem,
            "the file %.512s was replaced or removed, or cannot be read any more; give each run a file of its own",
            init->place);
    else if (waited > init->timeout)
        format_checked(m->problem, sizeof m->problem,
                       "rank %s of %lld did not come to %.512s within %.0f s (--init-timeout)%s", missing,
                       (long long)init->world, where, init->timeout,
                       door->strangers ? "; other connections came, and none showed a missing rank" : "");
}

// Accepts connections until all ranks have come. Dies if there is a problem.
static inline void meet_wait(Meeting *m, Door *door, const char *where) {
    const double start = seconds_now();
    char missing[128];
    for (bool told = false; m->missing && !*m->problem;) {
        door_serve(door, 0.5);
        const double waited = seconds_now() - start;
        if (m->missing && !*m->problem) meet_find_problem(m, door, where, waited);
        if (told || waited < MEET_NEWS_SECONDS) continue;
        meet_missing(m, missing, sizeof missing);
        printf("waiting at %s for rank %s of %lld\n", where, missing, (long long)m->init->world);
        fflush(stdout);
        told = true;
    }
    if (*m->problem) meet_fail(m);
}

// Sends the table to all other ranks. Dies if one is lost.
static inline void meet_send_table(Meeting *m) {
    const int64_t world = m->init->world, bytes = world * (int64_t)sizeof *m->cards;
    Answer answer = {};
    answer.kind = ANSWER_TABLE;
    for (int64_t r = 1; r < world; r++) {
        const double deadline = seconds_now() + SOCKET_LOST_SECONDS;
        if (!socket_all(m->fds[r], true, &answer, sizeof answer, deadline) ||
            !socket_all(m->fds[r], true, m->cards, bytes, deadline))
            die_with(EXIT_LOST, "rank %lld on %s was lost at the start: %s", (long long)r, m->cards[r].host,
                     strerror(errno));
        close(m->fds[r]);
    }
}

// ---- all ranks

// Rank 0: listens, waits for all other ranks, and sends them the table.
static inline void meet_as_first(Meeting *m) {
    const InitFrom *init = m->init;
    RankCard *own = &m->cards[0];
    char where[PATH_CAPACITY + 32], address[SOCKET_ADDRESS];
    Door door = {};
    if (init->kind == INIT_FILE) meet_file_check(init->place, own), meet_random_token(own->token);
    door.listener = socket_listen(init->place, init->port);
    if (door.listener < 0)
        die("--init-from: rank 0 cannot listen on port %d of %s: %s; --init-from tcp:HOST:PORT can name another port",
            init->port, own->host, strerror(errno));
    door.hello_bytes = sizeof(RankCard), door.admits = meet_admit, door.context = m;
    if (init->kind == INIT_FILE) {
        meet_guard_file(init->place);
        meet_file_write(init->place, own, socket_address(door.listener, true, address));
        format_checked(where, sizeof where, "%s", init->place);
    } else format_checked(where, sizeof where, "%s:%d", init->place, init->port);
    m->missing = init->world - 1;
    meet_wait(m, &door, where);
    if (init->kind == INIT_FILE) unlink(init->place), meet_guard_file("");
    meet_random_token(own->token);
    meet_send_table(m);
    door_close(&door);
}

// Connects to rank 0. Returns -1, with the reason, if that is not possible now.
static inline int meet_connect(const Meeting *m, RankCard *own, Failure *failure) {
    const InitFrom *init = m->init;
    MeetFile file;
    if (init->kind == INIT_TCP) return socket_connect(init->place, init->port, failure);
    if (!meet_file_read(init->place, &file)) {
        fail(failure, "%s is missing or cannot be read as a file of rank 0", init->place);
        return -1;
    }
    if (strcmp(file.job, init->job)) {
        fail(failure, "%s is of another job: %s", init->place, file.job);
        return -1;
    }
    format_checked(own->token, sizeof own->token, "%s", file.token);
    return meet_file_connect(&file, own, failure);
}

// True if the file of --init-from file:PATH has become another rank 0's than the one to which this rank is connected.
static inline bool meet_file_replaced(const Meeting *m, const RankCard *own) {
    MeetFile file;
    return m->init->kind == INIT_FILE && meet_file_read(m->init->place, &file) && strcmp(file.token, own->token) != 0;
}

// Shows the card to rank 0 and waits for its answer. Returns true with the table; false, with the reason, if another
// attempt may succeed. Ends this process if rank 0 answers that the run cannot start.
static inline bool meet_ask(Meeting *m, RankCard *own, int fd, double deadline, Failure *failure) {
    Answer answer;
    const int64_t bytes = m->init->world * (int64_t)sizeof *m->cards;
    const bool sent = socket_all(fd, true, own, sizeof *own, deadline);
    while (sent && !socket_await(fd, POLLIN, fmin(deadline, seconds_now() + 1)) && seconds_now() < deadline)
        if (meet_file_replaced(m, own)) return fail(failure, "rank 0 has written %s again", m->init->place);
    if (!sent || !socket_all(fd, false, &answer, sizeof answer, deadline))
        return fail(failure, "no answer from rank 0: %s", strerror(errno));
    answer.text[sizeof answer.text - 1] = 0;
    if (answer.kind == ANSWER_WRONG) die_with(answer.code ? answer.code : EXIT_OTHER, "%s", answer.text);
    if (answer.kind == ANSWER_ENDED) _exit(answer.code ? answer.code : EXIT_OTHER);  // rank 0 has printed the reason
    if (answer.kind != ANSWER_TABLE) return fail(failure, "%s", answer.text);
    if (!socket_all(fd, false, m->cards, bytes, deadline))
        return fail(failure, "the table of ranks did not arrive from rank 0: %s", strerror(errno));
    char reached[SOCKET_ADDRESS];
    socket_address(fd, false, reached);
    for (int64_t r = 0; r < m->init->world; r++) {
        if (!card_valid(&m->cards[r])) die("rank 0 sent a damaged table of ranks");
        if (!*m->cards[r].address) format_checked(m->cards[r].address, SOCKET_ADDRESS, "%s", reached);
    }
    return true;
}

// Ranks above 0: find rank 0 and get the table.
static inline void meet_as_other(Meeting *m) {
    const InitFrom *init = m->init;
    const double deadline = seconds_now() + init->timeout;
    RankCard own = m->cards[init->rank];
    Failure failure;
    for (bool met = false; !met;) {
        const int fd = meet_connect(m, &own, &failure);
        // rank 0 answers at the latest at its own deadline, which may be later than this rank's
        if (fd >= 0) met = meet_ask(m, &own, fd, seconds_now() + init->timeout + DOOR_PATIENCE, &failure), close(fd);
        if (!met && seconds_now() > deadline)
            die_with(EXIT_LOST, "rank 0 could not be reached within %.0f s (--init-timeout): %s", init->timeout,
                     failure.text);
        if (!met) usleep(200000);
    }
}

// Listens on a free port, but not on the one where rank 0 will listen, which the kernel may offer.
static inline int meet_listen(const InitFrom *init) {
    char address[SOCKET_ADDRESS];
    const int fd = socket_listen(NULL, 0);
    if (fd < 0 || init->kind != INIT_TCP || socket_address(fd, true, address) != init->port) return fd;
    const int other = socket_listen(NULL, 0);
    close(fd);
    return other;
}

// Returns the meeting of all ranks, after all have come: its `cards` are the table, with addresses that ranks above 0
// can connect to, and its `listener` is the socket at which the ranks above this one connect. Dies if they do not meet
// in time.
static inline Meeting meet(const InitFrom *init) {
    Meeting m = {};
    m.init = init;
    m.cards = (RankCard *)xcalloc((size_t)init->world, sizeof *m.cards);
    m.fds = (int *)xcalloc((size_t)init->world, sizeof *m.fds);
    for (int64_t r = 0; r < init->world; r++) m.fds[r] = -1;
    m.listener = meet_listen(init);
    if (m.listener < 0) die("cannot listen for other ranks: %s", strerror(errno));
    RankCard *own = &m.cards[init->rank];
    *own = meet_card(init, CARD_RANK);
    own->port = socket_address(m.listener, true, own->address);
    own->address[0] = 0;
    if (init->rank == 0) meet_as_first(&m);
    else meet_as_other(&m);
    free(m.fds);
    return m;
}

#endif
