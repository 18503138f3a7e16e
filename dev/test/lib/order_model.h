// Records operations of the streams of several ranks, then runs them and checks that accesses to memory are ordered.
//
// A test records the operations of each stream: reads and writes of memory, events recorded and waited for, values that
// streams write and wait for, collectives, messages between ranks. Then all streams run, each as far as its waits
// allow. Every stream has a vector clock: how many reads and writes of each stream have happened before. Events,
// values, collectives and messages carry clocks to other streams. The model counts "races" (two operations on the same
// memory, at least one of them a write, that the clocks do not order), "wrong" (reads that find other content than
// expected) and "stuck" (streams that do not reach their end).
//
// The next stream to run is chosen at random. Clocks do not depend on that choice, so one order of running is enough to
// tell whether there is a race.
#ifndef DEV_TEST_ORDER_MODEL_H
#define DEV_TEST_ORDER_MODEL_H

#include "../../../llmc/base/rng.h"

enum {
    ORDER_MAX_RANKS = 4,
    ORDER_STREAMS = 5,
    ORDER_MAX_STREAMS = ORDER_MAX_RANKS * ORDER_STREAMS
};  // stream s belongs to rank s / ORDER_STREAMS
enum {
    ORDER_MAX_OPERATIONS = 1 << 14,
    ORDER_MAX_RECORDS = 1 << 14,
    ORDER_MAX_PIECES = 1 << 12,
    ORDER_MAX_SIGNALS = 64,
    ORDER_MAX_VALUES = 1 << 10,
    ORDER_MAX_MESSAGES = 1 << 9
};
enum { ORDER_PLACES = 1 << 12 };

// The memory of rank r begins at (r + 1) times this number. No program accesses memory at these addresses.
#define ORDER_MEMORY_STRIDE (1ll << 40)

// Content of memory: a positive number that the test chooses. Its upper bits hold the number of ranks over which it was
// summed.
static const int64_t ORDER_UNWRITTEN = 0, ORDER_MIXED = -1;
// Other contents that a read may expect or a write may leave:
static const int64_t ORDER_ANY = -2;  // any content
// A read with ORDER_CARRIED allows any content. The stream's next write with ORDER_CARRIED writes that content, or
// ORDER_MIXED if there were several such reads and they found different contents.
static const int64_t ORDER_CARRIED = -3;

static inline int64_t order_content(int64_t what, int64_t summed) { return (summed << 48) + what; }
static inline int64_t order_sum(int64_t content, int64_t ranks) {
    return ranks && content > 0 ? content + (content >> 48 << 48) * (ranks - 1) : content;
}

typedef struct {
    int32_t at[ORDER_MAX_STREAMS];  // how many reads and writes of each stream have happened before
} OrderClock;

typedef enum {
    ORDER_READ,
    ORDER_WRITE,
    ORDER_RECORD,
    ORDER_WAIT,
    ORDER_SIGNAL,
    ORDER_AWAIT,
    ORDER_COLLECTIVE,
    ORDER_SEND,
    ORDER_RECEIVE,
    ORDER_SENT
} OrderKind;

typedef struct {
    OrderKind kind;
    const char *from, *to;  // memory that is read, and memory that is written
    int64_t bytes, to_bytes;
    int64_t value;   // reads, writes: content; record, wait: number of the record; signal, await: value; messages: rank
    int64_t summed;  // writes, collectives: ranks over which the content is summed; 0: not summed
    const char *name;  // collectives, messages
    const int *group;  // collectives, messages: the number of ranks that take part; equal pointers mean one group
} OrderOperation;

typedef struct {
    OrderOperation operations[ORDER_MAX_OPERATIONS];
    int64_t count, next;
    OrderClock clock;
    int64_t carried;
    bool passed_on;  // `carried` has been written
} OrderStream;

// A piece of a rank's memory whose bytes have all had the same accesses.
typedef struct {
    int64_t content;
    int writer;                        // stream that wrote last
    int32_t write;                     // number of that write in its stream; 0: never written
    int32_t reads[ORDER_MAX_STREAMS];  // number of each stream's last read
} OrderPiece;

// A piece ends where the next one begins. `begins` is sorted, and apart from the other fields for fast searches.
typedef struct {
    const char *begins[ORDER_MAX_PIECES];
    OrderPiece pieces[ORDER_MAX_PIECES];
    int64_t count;
    // A cache by the hash of an address: the piece that the last search for an address with this hash found.
    int64_t found[ORDER_PLACES];
} OrderMemory;

// Values written to one address. One stream waits for them.
typedef struct {
    const char *address;
    int64_t count, seen;
    uint32_t value[ORDER_MAX_VALUES];
    OrderClock clock[ORDER_MAX_VALUES];
} OrderSignal;

typedef struct {
    const int *group;
    int64_t bytes, content;
    OrderClock clock;
} OrderMessage;

// Messages from one rank to another. They are received in the order in which they were sent.
typedef struct {
    int64_t sent, received;
    OrderMessage messages[ORDER_MAX_MESSAGES];
} OrderChannel;

typedef struct {
    int64_t ranks;
    OrderStream streams[ORDER_MAX_STREAMS];
    OrderMemory memory[ORDER_MAX_RANKS];
    OrderClock records[ORDER_MAX_RECORDS];
    bool recorded[ORDER_MAX_RECORDS];
    OrderSignal signals[ORDER_MAX_SIGNALS];
    OrderChannel channels[ORDER_MAX_RANKS][ORDER_MAX_RANKS];  // from a rank, to a rank
    int64_t num_records, num_signals;
    int64_t races, wrong, stuck;
    char problem[512];                // the first problem
    const char *const *stream_names;  // [ORDER_STREAMS], for `problem`
    const char *(*name_of)(int64_t rank, const char *address);
} Order;

static Order order;

// ---- Recording

static inline char *order_base(int64_t rank) { return (char *)((1 + rank) * ORDER_MEMORY_STRIDE); }

static inline void order_begin(int64_t num_ranks, const char *const stream_names[ORDER_STREAMS],
                               const char *(*name_of)(int64_t rank, const char *address)) {
    if (num_ranks > ORDER_MAX_RANKS) die("more than %d ranks", ORDER_MAX_RANKS);
    order.ranks = num_ranks, order.stream_names = stream_names, order.name_of = name_of;
    order.num_records = order.num_signals = order.races = order.wrong = order.stuck = order.problem[0] = 0;
    for (int from = 0; from < ORDER_MAX_RANKS; from++)
        for (int to = 0; to < ORDER_MAX_RANKS; to++)
            order.channels[from][to].sent = order.channels[from][to].received = 0;
    for (int i = 0; i < ORDER_MAX_STREAMS; i++) {
        OrderStream *s = &order.streams[i];
        memset(&s->clock, 0, sizeof s->clock);
        s->count = s->next = 0, s->passed_on = true;
    }
}

// A rank's memory begins as one piece that was never written. A second piece marks its end.
static inline void order_memory(int64_t rank, int64_t bytes) {
    OrderMemory *m = &order.memory[rank];
    memset(m->pieces, 0, 2 * sizeof *m->pieces);
    m->count = 2;
    m->begins[0] = order_base(rank), m->begins[1] = order_base(rank) + bytes;
}

static inline OrderOperation *order_note(int stream, OrderKind kind, int64_t value) {
    OrderStream *s = &order.streams[stream];
    if (s->count == ORDER_MAX_OPERATIONS) die("more than %d operations", ORDER_MAX_OPERATIONS);
    OrderOperation *o = &s->operations[s->count++];
    memset(o, 0, sizeof *o);
    o->kind = kind, o->value = value;
    return o;
}

static inline void order_read(int stream, const void *from, int64_t bytes, int64_t content) {
    OrderOperation *o = order_note(stream, ORDER_READ, content);
    o->from = (const char *)from, o->bytes = bytes;
}

static inline OrderOperation *order_write(int stream, const void *to, int64_t bytes, int64_t content) {
    OrderOperation *o = order_note(stream, ORDER_WRITE, content);
    o->to = (const char *)to, o->to_bytes = bytes;
    return o;
}

// Returns the number of the record, for order_wait.
static inline int64_t order_record(int stream) {
    if (order.num_records == ORDER_MAX_RECORDS) die("more than %d records of events", ORDER_MAX_RECORDS);
    order.recorded[order.num_records] = false;
    order_note(stream, ORDER_RECORD, order.num_records);
    return order.num_records++;
}

static inline void order_wait(int stream, int64_t record) { order_note(stream, ORDER_WAIT, record); }

// order_signal writes a value to an address. order_await waits until that value, or one that is later in cyclic order,
// is there.
static inline void order_signal(int stream, const void *at, uint32_t value) {
    order_note(stream, ORDER_SIGNAL, value)->to = (const char *)at;
}
static inline void order_await(int stream, const void *at, uint32_t value) {
    order_note(stream, ORDER_AWAIT, value)->to = (const char *)at;
}

static inline void order_collective(int stream, const char *name, const int *group, const void *from, int64_t bytes,
                                    void *to, int64_t to_bytes, int64_t summed) {
    OrderOperation *o = order_note(stream, ORDER_COLLECTIVE, 0);
    o->name = name, o->group = group, o->summed = summed;
    o->from = (const char *)from, o->bytes = bytes, o->to = (const char *)to, o->to_bytes = to_bytes;
}

// order_send sends memory to a rank. order_receive waits for the next message from a rank, which must have as many
// bytes, and writes it to memory. order_sent waits until a rank has received all messages that this stream's rank has
// sent to it so far. order_sent carries no clock back from the receiver: a message may leave the sender's memory before
// the receiver asks for it.
static inline void order_send(int stream, const int *group, const void *from, int64_t bytes, int64_t to_rank) {
    OrderOperation *o = order_note(stream, ORDER_SEND, to_rank);
    o->name = "a message", o->group = group, o->from = (const char *)from, o->bytes = bytes;
}
static inline void order_receive(int stream, const int *group, void *to, int64_t bytes, int64_t from_rank) {
    OrderOperation *o = order_note(stream, ORDER_RECEIVE, from_rank);
    o->name = "a message", o->group = group, o->to = (const char *)to, o->to_bytes = bytes;
}
static inline void order_sent(int stream, int64_t to_rank) {
    order_note(stream, ORDER_SENT, to_rank)->name = "the receiver of a message";
}

// ---- Memory

static inline int64_t order_rank_of(const char *address) {
    const int64_t rank = (int64_t)((uintptr_t)address / ORDER_MEMORY_STRIDE) - 1;
    if (rank < 0 || rank >= order.ranks) die("address %p is in no rank's memory", (const void *)address);
    return rank;
}

static inline const char *order_stream_name(int stream) { return order.stream_names[stream % ORDER_STREAMS]; }

static inline void order_report(int64_t *count, int stream, const char *does, const char *address, const char *but,
                                int other) {
    if ((*count)++ || *order.problem) return;
    const int64_t rank = order_rank_of(address);
    char by[64] = "";
    if (other >= 0)
        format_checked(by, sizeof by, " rank %d's %s stream", other / ORDER_STREAMS, order_stream_name(other));
    format_checked(order.problem, sizeof order.problem, "rank %d's %s stream %s %s of rank %lld, %s%s",
                   stream / ORDER_STREAMS, order_stream_name(stream), does, order.name_of(rank, address),
                   (long long)rank, but, by);
}

// Cuts a piece in two. The second one has the number `second` and begins at `address`.
static inline void order_cut(OrderMemory *m, int64_t second, const char *address) {
    if (m->count == ORDER_MAX_PIECES) die("more than %d pieces of memory", ORDER_MAX_PIECES);
    const size_t after = (size_t)(m->count++ - second);
    memmove(&m->begins[second + 1], &m->begins[second], after * sizeof *m->begins);
    memmove(&m->pieces[second + 1], &m->pieces[second], after * sizeof *m->pieces);
    m->begins[second] = address;
    m->pieces[second] = m->pieces[second - 1];
}

// Returns the piece that begins at `address`. Cuts the piece that contains it if necessary.
static inline int64_t order_piece(OrderMemory *m, const char *address) {
    int64_t *found = &m->found[(uint64_t)(uintptr_t)address * 0x9e3779b97f4a7c15ull >> 52];
    if (*found < m->count && m->begins[*found] == address) return *found;
    int64_t low = 0, high = m->count;  // piece `low` begins at or before the address, piece `high` after it
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (m->begins[middle] <= address) low = middle;
        else high = middle;
    }
    if (m->begins[low] == address) return *found = low;
    if (address < m->begins[0] || high == m->count) die("address %p is outside a rank's memory", (const void *)address);
    order_cut(m, high, address);
    return *found = high;
}

// Returns the piece that begins at `address`, searched from piece `first` on. Cuts a piece in two if none begins there.
static inline int64_t order_piece_after(OrderMemory *m, int64_t first, const char *address) {
    int64_t i = first;
    while (i < m->count && m->begins[i] < address) i++;
    if (i == m->count) die("address %p is outside a rank's memory", (const void *)address);
    if (m->begins[i] != address) order_cut(m, i, address);
    return i;
}

// Returns the content, or ORDER_MIXED if the bytes have different contents.
static inline int64_t order_run_read(int stream, const char *from, int64_t bytes) {
    OrderMemory *m = &order.memory[order_rank_of(from)];
    OrderClock *now = &order.streams[stream].clock;
    const int32_t number = ++now->at[stream];
    const int64_t begin = order_piece(m, from), end = order_piece_after(m, begin, from + bytes),
                  content = m->pieces[begin].content;
    bool same = true;
    for (int64_t i = begin; i < end; i++) {
        OrderPiece *p = &m->pieces[i];
        if (p->write > now->at[p->writer])
            order_report(&order.races, stream, "reads", m->begins[i], "in no order with the write by", p->writer);
        p->reads[stream] = number;
        same = same && p->content == content;
    }
    return same ? content : ORDER_MIXED;
}

static inline void order_run_write(int stream, const char *to, int64_t bytes, int64_t content) {
    OrderMemory *m = &order.memory[order_rank_of(to)];
    OrderClock *now = &order.streams[stream].clock;
    const int32_t number = ++now->at[stream];
    const int64_t begin = order_piece(m, to), end = order_piece_after(m, begin, to + bytes);
    for (int64_t i = begin; i < end; i++) {
        OrderPiece *p = &m->pieces[i];
        if (p->write > now->at[p->writer])
            order_report(&order.races, stream, "writes", m->begins[i], "in no order with the write by", p->writer);
        for (int other = 0; other < ORDER_MAX_STREAMS; other++)
            if (p->reads[other] > now->at[other])
                order_report(&order.races, stream, "writes", m->begins[i], "in no order with the read by", other);
        p->writer = stream, p->write = number, p->content = content;
    }
}

// ---- Running

static inline void order_join(OrderClock *now, const OrderClock *before) {
    for (int i = 0; i < ORDER_MAX_STREAMS; i++)
        if (now->at[i] < before->at[i]) now->at[i] = before->at[i];
}

static inline OrderSignal *order_signal_at(const char *address) {
    for (int64_t i = 0; i < order.num_signals; i++)
        if (order.signals[i].address == address) return &order.signals[i];
    if (order.num_signals == ORDER_MAX_SIGNALS) die("values at more than %d addresses", ORDER_MAX_SIGNALS);
    OrderSignal *s = &order.signals[order.num_signals++];
    s->address = address, s->count = s->seen = 0;
    return s;
}

static inline void order_run_signal(const OrderStream *s, const OrderOperation *o) {
    OrderSignal *at = order_signal_at(o->to);
    if (at->count == ORDER_MAX_VALUES) die("more than %d values", ORDER_MAX_VALUES);
    at->value[at->count] = (uint32_t)o->value;
    at->clock[at->count++] = s->clock;
}

// Finds the first value, in the order of writing, that is the awaited one or later in cyclic order. Later operations of
// this stream see everything before that write. Only one stream writes to an address, and only one waits for its
// values.
static inline bool order_run_await(OrderStream *s, const OrderOperation *o) {
    OrderSignal *at = order_signal_at(o->to);
    while (at->seen < at->count && (int32_t)(at->value[at->seen] - (uint32_t)o->value) < 0) at->seen++;
    if (at->seen == at->count) return false;
    order_join(&s->clock, &at->clock[at->seen]);
    return true;
}

// Lists in `members` the streams whose next operation is a collective of the same group, and returns their number.
// Returns 0 if the collectives or their sizes differ.
static inline int order_members(const OrderOperation *o, int members[ORDER_MAX_STREAMS]) {
    int count = 0;
    for (int i = 0; i < order.ranks * ORDER_STREAMS; i++) {
        const OrderStream *s = &order.streams[i];
        const OrderOperation *its = &s->operations[s->next];
        if (s->next == s->count || its->kind != ORDER_COLLECTIVE || its->group != o->group) continue;
        if (strcmp(its->name, o->name) != 0 || its->bytes != o->bytes || its->to_bytes != o->to_bytes) return 0;
        members[count++] = i;
    }
    return count;
}

// Runs a collective, or returns false if not all ranks of its group have reached it. Each rank reads and writes its own
// memory, perhaps before other ranks reach the collective, so these accesses must be ordered by the rank's own clock.
// Later operations see everything that happened before the collective on all ranks.
static inline bool order_run_collective(const OrderOperation *o) {
    int members[ORDER_MAX_STREAMS];
    const int count = order_members(o, members);
    if (count < *o->group) return false;
    OrderClock before;
    memset(&before, 0, sizeof before);
    for (int i = 0; i < count; i++) order_join(&before, &order.streams[members[i]].clock);
    int64_t content = ORDER_ANY;
    for (int i = 0; i < count; i++) {
        const OrderStream *s = &order.streams[members[i]];
        const int64_t its = order_run_read(members[i], s->operations[s->next].from, o->bytes);
        content = content == ORDER_ANY || content == its ? its : ORDER_MIXED;
    }
    for (int i = 0; i < count; i++) {
        OrderStream *s = &order.streams[members[i]];
        order_run_write(members[i], s->operations[s->next++].to, o->to_bytes, order_sum(content, o->summed));
        order_join(&s->clock, &before);
    }
    return true;
}

static inline void order_run_send(int stream, const OrderOperation *o) {
    OrderChannel *c = &order.channels[stream / ORDER_STREAMS][o->value];
    if (c->sent == ORDER_MAX_MESSAGES) die("more than %d messages", ORDER_MAX_MESSAGES);
    OrderMessage *m = &c->messages[c->sent++];
    m->group = o->group, m->bytes = o->bytes, m->content = order_run_read(stream, o->from, o->bytes);
    m->clock = order.streams[stream].clock;
}

// Returns false if the next message has not been sent, or has another group or size than this rank receives.
static inline bool order_run_receive(int stream, const OrderOperation *o) {
    OrderChannel *c = &order.channels[o->value][stream / ORDER_STREAMS];
    const OrderMessage *m = &c->messages[c->received];
    if (c->received == c->sent || m->group != o->group || m->bytes != o->to_bytes) return false;
    c->received++;
    order_run_write(stream, o->to, o->to_bytes, m->content);
    order_join(&order.streams[stream].clock, &m->clock);
    return true;
}

static inline bool order_run_sent(int stream, const OrderOperation *o) {
    const OrderChannel *c = &order.channels[stream / ORDER_STREAMS][o->value];
    return c->received == c->sent;
}

static inline void order_run_access(int stream, const OrderOperation *o) {
    OrderStream *s = &order.streams[stream];
    if (o->kind == ORDER_READ) {
        const int64_t content = order_run_read(stream, o->from, o->bytes);
        if (o->value == ORDER_CARRIED)
            s->carried = s->passed_on || s->carried == content ? content : ORDER_MIXED, s->passed_on = false;
        else if (o->value != ORDER_ANY && o->value != content)
            order_report(&order.wrong, stream, "reads", o->from, "and finds something else than it should", -1);
    } else {
        order_run_write(stream, o->to, o->to_bytes,
                        order_sum(o->value == ORDER_CARRIED ? s->carried : o->value, o->summed));
        if (o->value == ORDER_CARRIED) s->passed_on = true;
    }
}

// Runs the stream's next operation. Returns false if it must wait.
static inline bool order_step(int stream) {
    OrderStream *s = &order.streams[stream];
    const OrderOperation *o = &s->operations[s->next];
    if (o->kind == ORDER_COLLECTIVE) return order_run_collective(o);
    if (o->kind == ORDER_AWAIT && !order_run_await(s, o)) return false;
    if (o->kind == ORDER_WAIT && !order.recorded[o->value]) return false;
    if (o->kind == ORDER_RECEIVE && !order_run_receive(stream, o)) return false;
    if (o->kind == ORDER_SENT && !order_run_sent(stream, o)) return false;
    if (o->kind == ORDER_SEND) order_run_send(stream, o);
    if (o->kind == ORDER_WAIT) order_join(&s->clock, &order.records[o->value]);
    if (o->kind == ORDER_RECORD) order.records[o->value] = s->clock, order.recorded[o->value] = true;
    if (o->kind == ORDER_SIGNAL) order_run_signal(s, o);
    if (o->kind == ORDER_READ || o->kind == ORDER_WRITE) order_run_access(stream, o);
    s->next++;
    return true;
}

// Runs all streams, in an order chosen by the seed, until they end or none can continue.
static inline void order_run(uint64_t seed) {
    const uint64_t count = (uint64_t)(order.ranks * ORDER_STREAMS);
    bool moves = true;
    for (uint64_t turn = 0; moves; turn++) {
        const uint64_t random = rng_u64(seed, turn);
        moves = false;
        for (uint64_t i = 0; i < count && !moves; i++) {
            const int stream = (int)((random % count + i) % count);
            const OrderStream *s = &order.streams[stream];
            for (uint64_t left = 1 + (random >> 32) % 32; left && s->next < s->count && order_step(stream); left--)
                moves = true;
        }
    }
    for (int i = 0; i < (int)count; i++) {
        const OrderStream *s = &order.streams[i];
        const OrderOperation *o = &s->operations[s->next];
        if (s->next == s->count) continue;
        order.stuck++;
        if (o->kind == ORDER_WAIT || *order.problem) continue;  // waits for an event of a stuck stream
        format_checked(order.problem, sizeof order.problem, "rank %d's %s stream waits for ever for %s",
                       i / ORDER_STREAMS, order_stream_name(i), o->kind == ORDER_AWAIT ? "a value" : o->name);
    }
}

#endif
