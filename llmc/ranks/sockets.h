// TCP connections between ranks: connect, listen, send and receive with a deadline, and admit only known callers.
// All sockets are non-blocking. A broken connection is found within about SOCKET_LOST_SECONDS, even if the other host
// is gone.
#ifndef LLMC_SOCKETS_H
#define LLMC_SOCKETS_H

#include <arpa/inet.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include "../base/file_io.h"

#define SOCKET_LOST_SECONDS 30
#define SOCKET_CONNECT_SECONDS 5  // for one address of a host

enum { SOCKET_ADDRESS = 64 };  // bytes of a numeric address, with its terminating zero

// Milliseconds to `deadline` for poll, at least 0 and at most about one minute.
static inline int socket_wait_ms(double deadline) {
    const double left = 1e3 * (deadline - seconds_now());
    return left < 0 ? 0 : left > 60000 ? 60000 : (int)left + 1;
}

// Waits until a socket is ready for `events` (POLLIN, POLLOUT) or has an error. Returns false at the deadline, or if
// poll fails.
static inline bool socket_await(int fd, short events, double deadline) {
    struct pollfd p = {fd, events, 0};
    int ready;
    do ready = poll(&p, 1, socket_wait_ms(deadline));
    while ((ready < 0 && errno == EINTR) || (ready == 0 && seconds_now() < deadline));
    return ready > 0;
}

static inline void socket_set(int fd, int level, int name, int value) {
    if (setsockopt(fd, level, name, &value, sizeof value)) die("setsockopt: %s", strerror(errno));
}

// Sets the options of every connection: no delay of small messages, and probes that find a lost host.
static inline void socket_prepare(int fd) {
    socket_set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    socket_set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    socket_set(fd, IPPROTO_TCP, TCP_KEEPIDLE, SOCKET_LOST_SECONDS / 3);
    socket_set(fd, IPPROTO_TCP, TCP_KEEPINTVL, SOCKET_LOST_SECONDS / 6);
    socket_set(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
    socket_set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 1000 * SOCKET_LOST_SECONDS);
}

static inline bool address_is_loopback(const char *address) {
    return strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
}

// Listens on `port`; 0: on any free port. `host`: a numeric loopback address, to listen there alone; any other text or
// NULL: on all addresses of this host. Returns the socket, or -1 with errno if that fails.
static inline int socket_listen(const char *host, int port) {
    struct sockaddr_in6 six = {};
    struct sockaddr_in four = {};
    six.sin6_family = AF_INET6, six.sin6_port = htons((uint16_t)port);
    four.sin_family = AF_INET, four.sin_port = htons((uint16_t)port);
    const int type = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
    const bool alone = host && address_is_loopback(host);
    if (alone && inet_pton(AF_INET6, host, &six.sin6_addr) != 1 && inet_pton(AF_INET, host, &four.sin_addr) != 1) {
        errno = EADDRNOTAVAIL;
        return -1;
    }
    int fd = alone && !strchr(host, ':') ? -1 : socket(AF_INET6, type, 0);
    const bool both = fd >= 0;  // a host may have no IPv6
    if (!both && (fd = socket(AF_INET, type, 0)) < 0) return -1;
    socket_set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (both) socket_set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    const int bound =
        both ? bind(fd, (struct sockaddr *)&six, sizeof six) : bind(fd, (struct sockaddr *)&four, sizeof four);
    if (bound == 0 && listen(fd, 4096) == 0) return fd;
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
}

// Writes the numeric address of a connection's other end, or with `own` of this end, and returns its port. If that
// fails, writes "" and returns 0.
static inline int socket_address(int fd, bool own, char address[SOCKET_ADDRESS]) {
    struct sockaddr_storage s;
    socklen_t length = sizeof s;
    char port[16];
    if ((own ? getsockname : getpeername)(fd, (struct sockaddr *)&s, &length) ||
        getnameinfo((struct sockaddr *)&s, length, address, SOCKET_ADDRESS, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV)) {
        address[0] = 0;
        return 0;
    }
    if (strncmp(address, "::ffff:", 7) == 0) memmove(address, address + 7, strlen(address + 7) + 1);  // IPv4 in IPv6
    return atoi(port);
}

// True if a connection's ends are one socket: a connect to a free port of this host may be given that port.
static inline bool socket_met_itself(int fd) {
    char own[SOCKET_ADDRESS], other[SOCKET_ADDRESS];
    return socket_address(fd, true, own) == socket_address(fd, false, other) && strcmp(own, other) == 0;
}

// Tries once to connect to one address, and waits at most until the deadline. Returns the socket, or -1 with errno.
static inline int socket_connect_one(const struct addrinfo *a, double deadline) {
    const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int error = 0;
    socklen_t length = sizeof error;
    if (fd < 0) return -1;
    if (connect(fd, a->ai_addr, a->ai_addrlen) == 0) error = 0;
    else if (errno != EINPROGRESS) error = errno;
    else if (!socket_await(fd, POLLOUT, deadline)) error = ETIMEDOUT;
    else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length)) error = errno;
    if (error == 0 && socket_met_itself(fd)) {
        const struct linger reset = {1, 0};  // a close in the usual way would keep the port for a minute
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        error = ECONNREFUSED;
    }
    if (error == 0) return fd;
    close(fd);
    errno = error;
    return -1;
}

// Connects to a host, given by name or numeric address: tries its addresses in turn, each once, until one accepts.
// Returns the socket, or -1 with the reason in *failure.
static inline int socket_connect(const char *host, int port, Failure *failure) {
    struct addrinfo hints = {}, *all = NULL;
    char service[16];
    hints.ai_socktype = SOCK_STREAM;
    format_checked(service, sizeof service, "%d", port);
    const int found = getaddrinfo(host, service, &hints, &all);
    if (found) {
        fail(failure, "%s: %s", host, gai_strerror(found));
        return -1;
    }
    int fd = -1;
    for (const struct addrinfo *a = all; a && fd < 0; a = a->ai_next)
        fd = socket_connect_one(a, seconds_now() + SOCKET_CONNECT_SECONDS);
    if (fd < 0) fail(failure, "%s:%d: %s", host, port, error_words().text);
    else socket_prepare(fd);
    freeaddrinfo(all);
    return fd;
}

// True for the errno of a call that must be repeated once the socket is ready.
static inline bool socket_again(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Sends as many bytes as a socket takes at once, or receives as many as it has, at most `bytes`. Returns their number,
// 0 if the socket is not ready, or -1 with errno if the connection is broken. When receiving, ECONNRESET also stands
// for a connection that the other end has closed.
static inline int64_t socket_some(int fd, bool sends, void *data, int64_t bytes) {
    const ssize_t n = sends ? send(fd, data, (size_t)bytes, MSG_NOSIGNAL) : recv(fd, data, (size_t)bytes, 0);
    if (n > 0 || bytes == 0) return n;
    if (n < 0 && socket_again(errno)) return 0;
    if (n == 0 && !sends) errno = ECONNRESET;
    return -1;
}

// Sends or receives all bytes. Returns false, with errno, if the connection breaks or the deadline comes first.
static inline bool socket_all(int fd, bool sends, void *data, int64_t bytes, double deadline) {
    for (int64_t done = 0; done < bytes;) {
        const int64_t n = socket_some(fd, sends, (char *)data + done, bytes - done);
        if (n < 0) return false;
        done += n;
        if (n == 0 && !socket_await(fd, sends ? POLLOUT : POLLIN, deadline)) {
            errno = ETIMEDOUT;
            return false;
        }
    }
    return true;
}

// ---- Door: a listener that admits only connections which begin with a valid hello of a fixed size, and closes others

enum { DOOR_GUESTS = 256 };  // connections that may wait with an unfinished hello; more stay in the kernel's queue
#define DOOR_PATIENCE 5      // seconds that a hello may take
#define DOOR_CROWDED 0.2     // this long while no more connections can be taken; ranks send their hello at once

typedef struct {
    int fd;
    int64_t received;
    double since;
    char *hello;  // [hello_bytes]
} DoorGuest;

// Decides about a connection whose hello is complete. Returns true if it keeps the connection.
typedef bool (*DoorAdmits)(void *context, int fd, const void *hello);

typedef struct {
    int listener;
    bool shut;                                   // this process can take no connection now: it has too many open files
    int64_t hello_bytes, num_guests, strangers;  // strangers: connections that were not kept
    DoorGuest guests[DOOR_GUESTS];
    DoorAdmits admits;
    void *context;
} Door;

static inline void door_remove(Door *d, int64_t i, bool kept) {
    if (!kept) close(d->guests[i].fd), d->strangers++;
    free(d->guests[i].hello);
    memmove(&d->guests[i], &d->guests[i + 1], (size_t)(d->num_guests - i - 1) * sizeof d->guests[0]);
    d->num_guests--;
}

static inline void door_accept(Door *d) {
    d->shut = false;
    while (d->num_guests < DOOR_GUESTS) {
        const int fd = accept(d->listener, NULL, NULL);
        d->shut = fd < 0 && !socket_again(errno);
        if (fd < 0) return;
        if (fcntl(fd, F_SETFL, O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC)) die("fcntl: %s", strerror(errno));
        socket_prepare(fd);
        const DoorGuest guest = {fd, 0, seconds_now(), (char *)xcalloc(1, (size_t)d->hello_bytes)};
        d->guests[d->num_guests++] = guest;
    }
}

// Receives more of guest i's hello, which may take `patience` seconds. Returns false if the guest is no longer in the
// list: it was kept or closed.
static inline bool door_receive(Door *d, int64_t i, double patience) {
    DoorGuest *g = &d->guests[i];
    const int64_t n = socket_some(g->fd, false, g->hello + g->received, d->hello_bytes - g->received);
    g->received += n > 0 ? n : 0;
    if (n >= 0 && g->received < d->hello_bytes && seconds_now() - g->since < patience) return true;
    const bool whole = n >= 0 && g->received == d->hello_bytes;
    door_remove(d, i, whole && d->admits(d->context, g->fd, g->hello));
    return false;
}

// Waits up to `seconds` for a connection or for bytes of a hello, and handles what has come. While no connection can be
// taken, it does not wait for one, which would be ready at once.
static inline void door_serve(Door *d, double seconds) {
    struct pollfd p[DOOR_GUESTS + 1];
    memset(p, 0, sizeof p);
    const bool full = d->shut || d->num_guests == DOOR_GUESTS;
    for (int64_t i = 0; i <= d->num_guests; i++)
        p[i].fd = i < d->num_guests ? d->guests[i].fd : d->listener, p[i].events = POLLIN;
    if (poll(p, (nfds_t)(d->num_guests + !full), (int)(1e3 * (full ? fmin(seconds, 0.1) : seconds))) < 0 &&
        errno != EINTR)
        die("poll: %s", strerror(errno));
    for (int64_t i = 0; i < d->num_guests;) i += door_receive(d, i, full ? DOOR_CROWDED : DOOR_PATIENCE);
    door_accept(d);
}

// Closes the connections that are not admitted yet, and stops listening.
static inline void door_close(Door *d) {
    while (d->num_guests) door_remove(d, 0, false);
    close(d->listener);
}

#endif
