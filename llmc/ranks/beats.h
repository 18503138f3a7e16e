// Messages between the watcher threads of all ranks (watch.h), in rows of a fixed size.
// A row is one message. At most one row of this rank is on its way to each other rank. Rows use an MPI communicator of
// their own, or the second connections of mesh.h. beats_send and beats_receive do not wait for other ranks.
#ifndef LLMC_BEATS_H
#define LLMC_BEATS_H

#include "comm.h"

typedef struct {
    const Comm *comm;  // NULL: not open
    int64_t bytes;     // size of a row
    MPI_Comm mpi;
    MPI_Request *requests;  // MPI: [world] sends on their way; synchronous, so that none pile up for a stopped rank
    char *rows;             // MPI: [world][bytes] rows on their way
    MPI_Request parting;    // MPI: the barrier of beats_part
    bool parts;             // MPI: this rank has entered that barrier
} Beats;

// Opens rows of `bytes` between all ranks. All ranks call it. Returns false if the MPI of a rank does not allow
// several threads to call it at the same time. *comm must stay where it is until beats_free. Dies if `bytes` is above
// MESH_ROW.
static inline bool beats_open(Beats *b, const Comm *comm, int64_t bytes) {
    int provided = MPI_THREAD_SINGLE, lowest = MPI_THREAD_SINGLE;
    memset(b, 0, sizeof *b);
    b->bytes = bytes, b->parting = MPI_REQUEST_NULL;
    if (bytes > MESH_ROW) die("a watcher's message has %lld bytes, more than %d", (long long)bytes, MESH_ROW);
    if (!comm->mesh) {
        COMM_CHECK(MPI_Query_thread(&provided));
        COMM_WAIT("all-reduce", MPI_Allreduce(&provided, &lowest, 1, MPI_INT, MPI_MIN, comm->comms[COMM_WORLD]));
        if (lowest < MPI_THREAD_MULTIPLE) return false;
        COMM_WAIT("MPI_Comm_dup", MPI_Comm_dup(comm->comms[COMM_WORLD], &b->mpi));
        b->requests = (MPI_Request *)xcalloc((size_t)comm->world, sizeof *b->requests);
        b->rows = (char *)xcalloc((size_t)comm->world, (size_t)bytes);
        for (int64_t r = 0; r < comm->world; r++) b->requests[r] = MPI_REQUEST_NULL;
    }
    b->comm = comm;
    return true;
}

// True if no row of this rank to `rank` is on its way. Over TCP this function also sends what is left of such a row,
// and returns true if the connection is broken.
static inline bool beats_sent(Beats *b, int64_t rank) {
    int done = 1;
    if (b->comm->mesh) return mesh_flush_to(b->comm->mesh, rank);
    if (b->requests[rank] != MPI_REQUEST_NULL) COMM_CHECK(MPI_Test(&b->requests[rank], &done, MPI_STATUS_IGNORE));
    return done;
}

// Sends a row to a rank. Drops this row if an earlier row to that rank is still on its way or, over TCP, if the
// connection is broken.
static inline void beats_send(Beats *b, int64_t rank, const void *row) {
    if (!beats_sent(b, rank)) return;
    if (b->comm->mesh) {
        mesh_send_row(b->comm->mesh, rank, row, b->bytes);
        return;
    }
    void *own = memcpy(b->rows + rank * b->bytes, row, (size_t)b->bytes);
    COMM_CHECK(MPI_Issend(own, (int)b->bytes, MPI_BYTE, (int)rank, 0, b->mpi, &b->requests[rank]));
}

// Receives a row that has arrived. Returns the rank that sent it, or -1 if no row has arrived. Over TCP, ends this
// process if another rank has ended with an error (mesh_take_row).
static inline int64_t beats_receive(Beats *b, void *row) {
    if (b->comm->mesh) return mesh_take_row(b->comm->mesh, row, b->bytes);
    int there = 0;
    MPI_Status status;
    COMM_CHECK(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, b->mpi, &there, &status));
    if (!there) return -1;
    const int from = status.MPI_SOURCE;
    COMM_CHECK(MPI_Recv(row, (int)b->bytes, MPI_BYTE, from, status.MPI_TAG, b->mpi, MPI_STATUS_IGNORE));
    return from;
}

// Ends the rows of all ranks. On each rank the watcher calls beats_receive and beats_part in turn until beats_part
// returns true. From then on no rank sends a row, and this thread does not call MPI.
static inline bool beats_part(Beats *b) {
    if (b->comm->mesh) return mesh_part(b->comm->mesh);
    bool sent = true;
    int parted = 0;
    // a rank enters the barrier when its own sends are complete, so none is pending once all ranks have entered it
    for (int64_t r = 0; r < b->comm->world; r++) sent = beats_sent(b, r) && sent;
    if (sent && !b->parts) {
        COMM_CHECK(MPI_Ibarrier(b->mpi, &b->parting));
        b->parts = true;
    }
    if (b->parts) COMM_CHECK(MPI_Test(&b->parting, &parted, MPI_STATUS_IGNORE));
    if (!parted) return false;
    COMM_CHECK(MPI_Comm_free(&b->mpi));
    return true;
}

// Frees memory, after beats_part returned true.
static inline void beats_free(Beats *b) {
    free(b->requests);
    free(b->rows);
    memset(b, 0, sizeof *b);
}

#endif
