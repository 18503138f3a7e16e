// Tests sockets.h: a connection to itself, and how a door (the listener of ranks that meet) treats connections that
// say nothing, too many of them, and a lack of file descriptors. Tests a notice (mesh.h) of a rank's end.
#include <sys/resource.h>

#include "../../llmc/ranks/mesh.h"
#include "lib/check.h"

enum { CROWD = DOOR_GUESTS + 50 };

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in a;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET, a.sin_port = htons((uint16_t)port), a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

static void test_met_itself(void) {
    char address[SOCKET_ADDRESS];
    Failure failure = {"", false};
    struct sockaddr_in a = loopback(0);
    const int fd = socket(AF_INET, SOCK_STREAM, 0), listener = socket_listen("127.0.0.1", 0);
    CHECK(bind(fd, (struct sockaddr *)&a, sizeof a) == 0, "a socket gets a port: %s", strerror(errno));
    a = loopback(socket_address(fd, true, address));
    CHECK(connect(fd, (struct sockaddr *)&a, sizeof a) == 0, "a socket connects to itself: %s", strerror(errno));
    CHECK(socket_met_itself(fd), "a connection to itself is found");
    const int other = socket_connect("127.0.0.1", socket_address(listener, true, address), &failure);
    CHECK(other >= 0 && !socket_met_itself(other), "a connection to a listener is none: %s", failure.text);
    close(fd), close(listener), close(other);
}

// Keeps connections whose hello is "hello".
static bool admits_hello(void *context, int fd, const void *hello) {
    if (memcmp(hello, "hello", 5) != 0) return false;
    *(int *)context = fd;
    return true;
}

// Serves the door until it has kept a connection, at most `seconds`. Returns the seconds that it took.
static double serve(Door *d, double seconds) {
    const double start = seconds_now();
    while (*(int *)d->context < 0 && seconds_now() - start < seconds) door_serve(d, 0.1);
    return seconds_now() - start;
}

static int knock(int port, const char *hello) {
    Failure failure;
    const int fd = socket_connect("127.0.0.1", port, &failure);
    if (fd < 0) die("%s", failure.text);
    if (send(fd, hello, strlen(hello), 0) != (ssize_t)strlen(hello)) die("send: %s", strerror(errno));
    return fd;
}

static void test_door(void) {
    char address[SOCKET_ADDRESS];
    int kept = -1, crowd[CROWD];
    Door d;
    memset(&d, 0, sizeof d);
    d.listener = socket_listen("127.0.0.1", 0), d.hello_bytes = 5, d.admits = admits_hello, d.context = &kept;
    const int port = socket_address(d.listener, true, address);
    int own[3] = {knock(port, "hel"), knock(port, "hallo"), knock(port, "hello")};
    CHECK(serve(&d, 5) < 1 && kept >= 0 && d.num_guests == 1 && d.strangers == 1,
          "of three, one is kept, one waits and one is closed: %lld wait, %lld were closed", (long long)d.num_guests,
          (long long)d.strangers);
    for (int i = 0; i < 3; i++) close(own[i]);
    close(kept), kept = -1;
    // Connections that say nothing fill the door, and more wait before the one that says hello.
    for (int i = 0; i < CROWD; i++) crowd[i] = knock(port, i % 2 ? "" : "he");
    own[0] = knock(port, "hello");
    const double took = serve(&d, 4);
    CHECK(kept >= 0, "the door keeps the last of %d, of which the others say nothing, after %.2f s", CROWD + 1, took);
    for (int i = 0; i < CROWD; i++) close(crowd[i]);
    close(own[0]), close(kept), kept = -1;
    // Without a free file descriptor no connection is made, and the door takes none, and waits. Later it takes it.
    Failure failure = {"", false};
    struct rlimit before, none;
    for (int i = 0; i < 5; i++) door_serve(&d, 0);
    own[0] = knock(port, "hello");
    getrlimit(RLIMIT_NOFILE, &before);
    none = before, none.rlim_cur = 3;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "the limit is set: %s", strerror(errno));
    CHECK(socket_connect("127.0.0.1", port, &failure) < 0 && strstr(failure.text, "raise that limit with ulimit -n"),
          "a connection that lacks a descriptor names the limit: %s", failure.text);
    const clock_t cpu = clock();
    CHECK(serve(&d, 0.3) >= 0.3 && d.shut && clock() - cpu < CLOCKS_PER_SEC / 10,
          "without a descriptor the door waits, and takes %.3f s of CPU time",
          (double)(clock() - cpu) / CLOCKS_PER_SEC);
    setrlimit(RLIMIT_NOFILE, &before);
    CHECK(serve(&d, 4) < 1 && kept >= 0, "with one it keeps the connection that has waited");
    close(own[0]), close(kept);
    door_close(&d);
}

// A rank's notice of its end with an error ends the others with its status, and never with 0.
static void test_notice(void) {
    const int codes[][2] = {{EXIT_LOST, EXIT_LOST}, {0, EXIT_OTHER}};
    for (int i = 0; i < 2; i++) {
        int ends[2];
        MeshPeer peers[2];
        Mesh m;
        memset(peers, 0, sizeof peers), memset(&m, 0, sizeof m);
        m.world = 2, m.peers = peers;
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends)) die("socketpair: %s", strerror(errno));
        peers[1].beats = ends[1];
        mesh_post(&peers[1], MESH_MESSAGE_ENDED, codes[i][0], NULL, 0);
        peers[1].beats = ends[0];
        CHECK(mesh_receive(&m) && m.code == codes[i][1], "a notice with status %d ends a rank with %d", codes[i][0],
              m.code);
        close(ends[0]), close(ends[1]);
    }
}

int main(void) {
    process_prepare();
    test_notice();
    test_met_itself();
    test_door();
    return check_report();
}
