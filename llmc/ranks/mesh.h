// Collectives between ranks that MPI did not start, by two TCP connections between every two ranks.
// One connection carries the collectives, the other the watchers' messages (watch.h) and notices of errors. A
// collective sends its parts straight from rank to rank. Each part has a header, so ranks that are in different
// collectives end with a clear error. If a rank ends with an error, it sends a notice to the others, which then end
// without a message of their own. If a connection breaks without such a notice, the rank at its other end counts as
// lost.
#ifndef LLMC_MESH_H
#define LLMC_MESH_H

#include "rendezvous.h"

#define MESH_SECONDS 60        // limit for the connections of the higher ranks to come, after all ranks have met
#define MESH_NOTICE_SECONDS 1  // limit for another rank's notice of an error to arrive, or for one to be sent to a rank

enum { MESH_ROW = 448 };  // most bytes of a row, a watcher's message

typedef enum { MESH_MESSAGE_ROW, MESH_MESSAGE_PARTED, MESH_MESSAGE_ENDED } MeshMessageKind;

typedef struct {
    int32_t kind, code;  // code: the sender's exit status, in MESH_MESSAGE_ENDED
    char row[MESH_ROW];
} MeshMessage;

typedef struct {
    int data, beats;  // the two connections to the rank; -1 for this rank itself
    char host[64];
    MeshMessage in, out;      // the messages that are being received and sent on `beats`
    int64_t received, sent;   // bytes of `in` and of `out` that are done; sent == sizeof out: all of `out` is sent
    bool fresh;               // `row` has arrived, and mesh_take_row has not returned it yet
    char row[MESH_ROW];       // the latest row that has arrived from the rank
    bool parted, gone, told;  // the rank sends no more rows; `beats` is broken; the rank was told that this one sends
                              // no more rows
} MeshPeer;

typedef struct {
    int64_t world, rank;
    MeshPeer *peers;        // [world]
    pthread_mutex_t mutex;  // guards the messages, which the watcher and a dying thread send and receive
    bool ended;             // a notice has come that another rank has ended with an error
    int code;               // the exit status of that rank
} Mesh;

// Members of a group: rank `first` + i * `stride` is member i; `self` is this rank's i.
typedef struct {
    int64_t first, stride, size, self;
} MeshGroup;

// ---- messages of the watchers

// Sends what is left of the message to a rank, as far as the connection takes it. Returns true once all of it is sent,
// or if the connection is broken.
static inline bool mesh_flush(MeshPeer *p) {
    const int64_t n = socket_some(p->beats, true, (char *)&p->out + p->sent, (int64_t)sizeof p->out - p->sent);
    if (n < 0) p->gone = true;
    p->sent += n > 0 ? n : 0;
    return p->gone || p->sent == (int64_t)sizeof p->out;
}

// Starts a message to a rank. The message before must have been sent.
static inline void mesh_post(MeshPeer *p, MeshMessageKind kind, int code, const void *row, int64_t bytes) {
    memset(&p->out, 0, sizeof p->out);
    p->out.kind = kind, p->out.code = code;
    if (bytes) memcpy(p->out.row, row, (size_t)bytes);
    p->sent = 0;
    mesh_flush(p);
}

static inline void mesh_receive_from(Mesh *m, MeshPeer *p) {
    while (!p->gone) {
        const int64_t n =
            socket_some(p->beats, false, (char *)&p->in + p->received, (int64_t)sizeof p->in - p->received);
        if (n == 0) return;
        if (n < 0) p->gone = true;
        else p->received += n;
        if (p->received < (int64_t)sizeof p->in) continue;
        p->received = 0;
        if (p->in.kind == MESH_MESSAGE_ROW) memcpy(p->row, p->in.row, MESH_ROW), p->fresh = true;
        if (p->in.kind == MESH_MESSAGE_PARTED) p->parted = true;
        if (p->in.kind == MESH_MESSAGE_ENDED) m->ended = true, m->code = p->in.code ? p->in.code : EXIT_OTHER;
    }
}

// Reads all messages that have arrived. Returns true if another rank has ended with an error; m->code is its exit
// status.
static inline bool mesh_receive(Mesh *m) {
    pthread_mutex_lock(&m->mutex);
    for (int64_t r = 0; r < m->world; r++)
        if (r != m->rank) mesh_receive_from(m, &m->peers[r]);
    const bool ended = m->ended;
    pthread_mutex_unlock(&m->mutex);
    return ended;
}

static inline bool mesh_flush_to(Mesh *m, int64_t rank) {
    pthread_mutex_lock(&m->mutex);
    const bool sent = mesh_flush(&m->peers[rank]);
    pthread_mutex_unlock(&m->mutex);
    return sent;
}

// Sends a watcher's row to a rank, unless the connection is broken. The message before must have been sent.
static inline void mesh_send_row(Mesh *m, int64_t rank, const void *row, int64_t bytes) {
    pthread_mutex_lock(&m->mutex);
    if (!m->peers[rank].gone) mesh_post(&m->peers[rank], MESH_MESSAGE_ROW, 0, row, bytes);
    pthread_mutex_unlock(&m->mutex);
}

// Ends this process, with the status of a rank that has ended with an error and has printed the reason.
__attribute__((noreturn)) static inline void mesh_follow(const Mesh *m) {
    flush_stdout();
    _exit(m->code);
}

// Takes one row that has arrived: copies it to `row` and returns the rank that sent it. Returns -1 if there is none.
// Ends this process if another rank has ended with an error.
static inline int64_t mesh_take_row(Mesh *m, void *row, int64_t bytes) {
    if (mesh_receive(m)) mesh_follow(m);
    for (int64_t r = 0; r < m->world; r++) {
        if (!m->peers[r].fresh) continue;
        memcpy(row, m->peers[r].row, (size_t)bytes);
        m->peers[r].fresh = false;
        return r;
    }
    return -1;
}

// Returns a rank whose connection `beats` is broken, or -1. Skips ranks that send no more rows: they may close it.
static inline int64_t mesh_gone(const Mesh *m) {
    for (int64_t r = 0; r < m->world; r++)
        if (m->peers[r].gone && !m->peers[r].parted) return r;
    return -1;
}

// Tells all ranks that this one sends no more rows. Returns true once each of them has said the same or is gone. Call
// it until it returns true. Ends this process if another rank has ended with an error.
static inline bool mesh_part(Mesh *m) {
    bool parted = true;
    if (mesh_receive(m)) mesh_follow(m);
    pthread_mutex_lock(&m->mutex);
    for (int64_t r = 0; r < m->world; r++) {
        MeshPeer *p = &m->peers[r];
        if (r == m->rank) continue;
        const bool sent = mesh_flush(p);
        if (sent && !p->told) mesh_post(p, MESH_MESSAGE_PARTED, 0, NULL, 0), p->told = true;
        parted = parted && p->told && mesh_flush(p) && (p->parted || p->gone);
    }
    pthread_mutex_unlock(&m->mutex);
    return parted;
}

// Tells all ranks that this one ends with an error. An earlier message to a rank must be sent first: if that takes more
// than MESH_NOTICE_SECONDS, the rank is not told.
static inline void mesh_end_all(Mesh *m, int code) {
    pthread_mutex_lock(&m->mutex);
    for (int64_t r = 0; r < m->world; r++) {
        MeshPeer *p = &m->peers[r];
        if (r == m->rank || p->gone) continue;
        const double deadline = seconds_now() + MESH_NOTICE_SECONDS;
        while (!mesh_flush(p) && socket_await(p->beats, POLLOUT, deadline)) continue;
        if (p->sent == (int64_t)sizeof p->out) mesh_post(p, MESH_MESSAGE_ENDED, code, NULL, 0);
    }
    pthread_mutex_unlock(&m->mutex);
}

// Waits for a notice that another rank has ended with an error. If one comes, ends this process with the status of that
// rank. Returns if none comes within `seconds`.
static inline void mesh_await_notice(Mesh *m, double seconds) {
    const double deadline = seconds_now() + seconds;
    do {
        if (mesh_receive(m)) mesh_follow(m);
    } while (usleep(20000), seconds_now() < deadline);
}

// ---- collectives

// Data that this rank sends to a member and receives from it. Negative bytes: not even a header moves that way.
typedef struct {
    const char *out;
    char *in;
    int64_t out_bytes, in_bytes;
} MeshPart;

typedef struct {
    int64_t collective, bytes;  // a number that names the collective; bytes of data after the header
} MeshHeader;

// The progress of one part. `sent` and `received` are bytes, those of the header included.
typedef struct {
    MeshPeer *peer;
    MeshHeader out_header, in_header;
    int64_t sent, received;
} MeshTransfer;

// Ends the run with an error about the rank of `p`. `error`: the errno of its broken connection; 0: it sent the header
// of another collective or size. If a notice comes that another rank has ended with an error, ends this process
// silently instead.
__attribute__((noreturn)) static inline void mesh_lost(Mesh *m, const MeshPeer *p, const char *what, int error) {
    mesh_await_notice(m, MESH_NOTICE_SECONDS);
    const long long rank = p - m->peers;
    if (error == ECONNRESET || error == EPIPE)
        die_with(EXIT_LOST, "rank %lld on %s was killed or has crashed; this rank waits for it in %s", rank, p->host,
                 what);
    if (error)
        die_with(EXIT_LOST, "rank %lld on %s cannot be reached any more (%s); this rank waits for it in %s", rank,
                 p->host, strerror(error), what);
    die("rank %lld on %s is in another collective, or in one with other sizes, than this rank, which is in %s", rank,
        p->host, what);
}

// Moves what it can of one direction of a part: the header, then the data. Returns false with errno if the connection
// breaks.
static inline bool mesh_move(int fd, bool sends, MeshHeader *header, char *data, int64_t bytes, int64_t *moved) {
    const int64_t head = (int64_t)sizeof *header;
    while (*moved < head + bytes) {
        char *at = *moved < head ? (char *)header + *moved : data + (*moved - head);
        const int64_t left = *moved < head ? head - *moved : head + bytes - *moved;
        const int64_t n = socket_some(fd, sends, at, min_i64(left, (int64_t)1 << 30));
        if (n <= 0) return n == 0;
        *moved += n;
        if (!sends && *moved == head) return true;  // the caller checks the header
    }
    return true;
}

// Moves what it can of the part of one member. Returns the poll events that the part still waits for; 0: all has moved.
static inline short mesh_step(Mesh *m, MeshTransfer *t, const MeshPart *part, const char *what) {
    const int64_t head = (int64_t)sizeof(MeshHeader);
    const int fd = t->peer->data;
    if (part->out_bytes >= 0 && !mesh_move(fd, true, &t->out_header, (char *)part->out, part->out_bytes, &t->sent))
        mesh_lost(m, t->peer, what, errno);
    for (int64_t before = -1; part->in_bytes >= 0 && t->received != before;) {
        before = t->received;
        if (!mesh_move(fd, false, &t->in_header, part->in, part->in_bytes, &t->received))
            mesh_lost(m, t->peer, what, errno);
        const bool other = t->in_header.collective != t->out_header.collective || t->in_header.bytes != part->in_bytes;
        if (t->received >= head && other) mesh_lost(m, t->peer, what, 0);
    }
    return (short)((part->out_bytes >= 0 && t->sent < head + part->out_bytes ? POLLOUT : 0) |
                   (part->in_bytes >= 0 && t->received < head + part->in_bytes ? POLLIN : 0));
}

// Sends and receives parts [size], one for each member, all at once, and frees `parts`. Returns 0. Dies if a rank is
// lost or in another collective.
static inline int mesh_exchange(Mesh *m, MeshGroup g, int64_t collective, const char *what, MeshPart *parts) {
    MeshTransfer *transfers = (MeshTransfer *)xcalloc((size_t)g.size, sizeof *transfers);
    struct pollfd *polls = (struct pollfd *)xcalloc((size_t)g.size, sizeof *polls);
    for (int64_t i = 0; i < g.size; i++) {
        MeshTransfer *t = &transfers[i];
        t->peer = &m->peers[g.first + i * g.stride];
        t->out_header.collective = collective, t->out_header.bytes = parts[i].out_bytes;
        polls[i].fd = i == g.self ? -1 : t->peer->data;
        polls[i].events = POLLIN | POLLOUT;
    }
    for (bool waits = true; waits;) {
        waits = false;
        for (int64_t i = 0; i < g.size; i++) {
            if (i == g.self || !polls[i].events) continue;
            polls[i].events = mesh_step(m, &transfers[i], &parts[i], what);
            if (!polls[i].events) polls[i].fd = -1;
            waits = waits || polls[i].events;
        }
        if (waits && poll(polls, (nfds_t)g.size, -1) < 0 && errno != EINTR) die("poll: %s", strerror(errno));
    }
    free(polls);
    free(transfers);
    free(parts);
    return 0;
}

static inline MeshPart *mesh_parts(MeshGroup g) {
    MeshPart *parts = (MeshPart *)xcalloc((size_t)g.size, sizeof *parts);
    for (int64_t i = 0; i < g.size; i++) parts[i].out_bytes = parts[i].in_bytes = -1;
    return parts;
}

// The collectives of comm.h. They return 0, like MPI's if they succeed; if they fail, they die.

static inline int mesh_all_gather(Mesh *m, MeshGroup g, const void *part, void *all, int64_t bytes) {
    MeshPart *parts = mesh_parts(g);
    char *own = (char *)all + g.self * bytes;
    if (bytes && part != own) memcpy(own, part, (size_t)bytes);
    for (int64_t i = 0; i < g.size; i++) {
        parts[i].out = own, parts[i].in = (char *)all + i * bytes;
        parts[i].out_bytes = parts[i].in_bytes = bytes;
    }
    return mesh_exchange(m, g, 1, "all-gather", parts);
}

static inline int mesh_all_to_all(Mesh *m, MeshGroup g, const void *from, void *to, int64_t bytes) {
    MeshPart *parts = mesh_parts(g);
    memcpy((char *)to + g.self * bytes, (const char *)from + g.self * bytes, (size_t)bytes);
    for (int64_t i = 0; i < g.size; i++) {
        parts[i].out = (const char *)from + i * bytes, parts[i].in = (char *)to + i * bytes;
        parts[i].out_bytes = parts[i].in_bytes = bytes;
    }
    return mesh_exchange(m, g, 2, "all-to-all", parts);
}

static inline int mesh_broadcast(Mesh *m, MeshGroup g, int64_t root, void *data, int64_t bytes) {
    MeshPart *parts = mesh_parts(g);
    for (int64_t i = 0; i < g.size; i++) {
        parts[i].out = (const char *)data, parts[i].in = (char *)data;
        if (g.self == root) parts[i].out_bytes = bytes;
        else if (i == root) parts[i].in_bytes = bytes;
    }
    return mesh_exchange(m, g, 3, "broadcast", parts);
}

static inline int mesh_barrier(Mesh *m, MeshGroup g) {
    MeshPart *parts = mesh_parts(g);
    for (int64_t i = 0; i < g.size; i++) parts[i].out_bytes = parts[i].in_bytes = 0;
    return mesh_exchange(m, g, 4, "barrier", parts);
}

// Does comm_exchange (comm.h).
static inline int mesh_exchange_with(Mesh *m, int64_t rank, const void *out, void *in, int64_t bytes) {
    const MeshGroup two = {min_i64(rank, m->rank), rank > m->rank ? rank - m->rank : m->rank - rank, 2, rank < m->rank};
    MeshPart *parts = mesh_parts(two), *other = &parts[!two.self];
    other->out = (const char *)out, other->in = (char *)in;
    other->out_bytes = other->in_bytes = bytes;
    return mesh_exchange(m, two, 5, "exchange", parts);
}

// ---- start

typedef struct {
    Mesh *mesh;
    const Meeting *meeting;
    int64_t missing;  // connections of higher ranks that have not come yet
} MeshDoor;

// Keeps a connection (DoorAdmits) if a higher rank of this run opened it, and if it is that rank's first of this kind.
static inline bool mesh_admit(void *context, int fd, const void *hello) {
    MeshDoor *d = (MeshDoor *)context;
    RankCard card;
    memcpy(&card, hello, sizeof card);
    const bool wanted = card_valid(&card) && strcmp(card.token, d->meeting->cards[0].token) == 0 &&
                        card.rank > d->mesh->rank && card.rank < d->mesh->world &&
                        (card.kind == CARD_DATA || card.kind == CARD_BEATS);
    if (!wanted) return false;
    int *slot = card.kind == CARD_DATA ? &d->mesh->peers[card.rank].data : &d->mesh->peers[card.rank].beats;
    if (*slot >= 0) return false;
    *slot = fd;
    d->missing--;
    return true;
}

// Opens a connection to a lower rank. Dies if that fails.
static inline int mesh_connect(const Meeting *meeting, int64_t rank, CardKind kind) {
    const RankCard *to = &meeting->cards[rank];
    RankCard card = meeting->cards[meeting->init->rank];
    Failure failure;
    card.kind = kind;
    format_checked(card.token, sizeof card.token, "%s", meeting->cards[0].token);
    const int fd = socket_connect(to->address, to->port, &failure);
    if (fd < 0) die_with(EXIT_LOST, "cannot connect to rank %lld on %s: %s", (long long)rank, to->host, failure.text);
    if (!socket_all(fd, true, &card, sizeof card, seconds_now() + MESH_SECONDS))
        die_with(EXIT_LOST, "cannot connect to rank %lld on %s: %s", (long long)rank, to->host, strerror(errno));
    return fd;
}

// Waits for the connections of the higher ranks. Dies if one has not come within MESH_SECONDS.
static inline void mesh_accept(Mesh *m, const Meeting *meeting) {
    MeshDoor context = {m, meeting, 2 * (m->world - 1 - m->rank)};
    Door door = {};
    door.listener = meeting->listener, door.hello_bytes = sizeof(RankCard);
    door.admits = mesh_admit, door.context = &context;
    const double deadline = seconds_now() + MESH_SECONDS;
    while (context.missing && seconds_now() < deadline) door_serve(&door, 0.5);
    door_close(&door);
    for (int64_t r = m->rank + 1; r < m->world; r++)
        if (m->peers[r].data < 0 || m->peers[r].beats < 0)
            die_with(EXIT_LOST, "rank %lld on %s has not connected to this rank within %d s", (long long)r,
                     m->peers[r].host, MESH_SECONDS);
}

// Returns the mesh of a meeting's ranks, with no connection yet.
static inline Mesh *mesh_new(const Meeting *meeting) {
    const InitFrom *init = meeting->init;
    Mesh *m = (Mesh *)xcalloc(1, sizeof *m);
    m->world = init->world, m->rank = init->rank;
    m->peers = (MeshPeer *)xcalloc((size_t)m->world, sizeof *m->peers);
    if (pthread_mutex_init(&m->mutex, NULL)) die("pthread_mutex_init failed");
    for (int64_t r = 0; r < m->world; r++) {
        MeshPeer *p = &m->peers[r];
        p->data = p->beats = -1;
        p->sent = (int64_t)sizeof p->out;
        memcpy(p->host, meeting->cards[r].host, sizeof p->host);
    }
    return m;
}

// Makes this rank's connections to all other ranks. Dies if one cannot be made.
static inline void mesh_open(Mesh *m, const Meeting *meeting) {
    for (int64_t r = 0; r < m->rank; r++) {
        m->peers[r].data = mesh_connect(meeting, r, CARD_DATA);
        m->peers[r].beats = mesh_connect(meeting, r, CARD_BEATS);
    }
    mesh_accept(m, meeting);
}

#endif
