// A slow and lossy network in user space, for Linux kernels without tc's netem. Joins network interfaces like a hub:
// each frame that one of them receives is sent on all others after a delay, or is lost. Prints a line when it has
// begun.
// usage: slow_link DELAY_MS LOSS_PERCENT INTERFACE...
#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 8, MAX_FRAME = 1 << 17 };  // a frame may hold many TCP segments, up to 64 KiB

typedef struct Frame {
    struct Frame *next;
    double due;
    int from;
    ssize_t size;
    char data[];
} Frame;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Returns a socket that receives the frames that arrive at the interface, not those that leave through it. Each frame
// begins with a virtio_net header, which says how far checksum and segmentation are done. The header is sent on with
// the frame, so that the Linux kernel does the rest.
static int port_open(const char *name) {
    const int fd = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)), on = 1;
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    address.sll_ifindex = (int)if_nametoindex(name);
    if (fd < 0 || !address.sll_ifindex) fail(name);
    if (setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on)) fail("PACKET_IGNORE_OUTGOING");
    if (setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on)) fail("PACKET_VNET_HDR");
    if (bind(fd, (struct sockaddr *)&address, sizeof address)) fail(name);
    return fd;
}

// Losses are pseudo-random, from a fixed seed.
static int is_lost(double percent) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 33) < percent / 100 * 2147483648.0;
}

// Receives one frame and returns it, or NULL if it cannot be received or is to be lost.
static Frame *frame_receive(int fd, int from, double delay, double loss) {
    static char buffer[MAX_FRAME];
    const ssize_t size = recv(fd, buffer, sizeof buffer, 0);
    if (size < (ssize_t)sizeof(struct virtio_net_hdr) || is_lost(loss)) return NULL;
    Frame *frame = malloc(sizeof *frame + (size_t)size);
    if (!frame) fail("malloc");
    frame->next = NULL, frame->due = seconds_now() + delay, frame->from = from, frame->size = size;
    memcpy(frame->data, buffer, (size_t)size);
    return frame;
}

int main(int argc, char **argv) {
    const int ports = argc - 3;
    if (ports < 2 || ports > MAX_PORTS)
        return fprintf(stderr, "usage: slow_link DELAY_MS LOSS_PERCENT INTERFACE...\n"), 2;
    const double delay = atof(argv[1]) / 1000, loss = atof(argv[2]);
    struct pollfd polled[MAX_PORTS];
    Frame *first = NULL, **last = &first;
    for (int p = 0; p < ports; p++) polled[p] = (struct pollfd){.fd = port_open(argv[3 + p]), .events = POLLIN};
    if (puts("joined") < 0 || fflush(stdout)) fail("stdout");
    for (;;) {
        const double left = first ? first->due - seconds_now() : 1;
        if (poll(polled, (nfds_t)ports, left > 0 ? (int)(1000 * left + 0.999) : 0) < 0) fail("poll");
        for (int p = 0; p < ports; p++) {
            if (!(polled[p].revents & POLLIN)) continue;
            Frame *frame = frame_receive(polled[p].fd, p, delay, loss);
            if (frame) *last = frame, last = &frame->next;
        }
        while (first && first->due <= seconds_now()) {
            Frame *frame = first;
            for (int p = 0; p < ports; p++)  // an interface that is down loses the frame
                if (p != frame->from && send(polled[p].fd, frame->data, (size_t)frame->size, 0) < 0) continue;
            first = frame->next;
            if (!first) last = &first;
            free(frame);
        }
    }
}
