// Tests receipts (llmc/reference/receipt.h): a tensor's hash does not depend on how it is cut into parts, nor on its
// neighbours, and changes with each of its bits.
#include "../../llmc/reference/receipt.h"
#include "lib/check.h"

enum { ELEMENTS = 600 };

static uint64_t sum_of(const void *array, int64_t bytes, int64_t flat, int64_t count) {
    const ReceiptPart whole = {flat, count, flat};
    return receipt_sum(array, bytes, whole);
}

// Sums parts that lie in arrays of their own, cut at multiples of 128 elements as slices are.
static uint64_t sum_of_slices(const char *array, int64_t bytes, int64_t flat, int64_t count) {
    static uint64_t slice[128];
    uint64_t sum = 0;
    for (int64_t begin = 0; begin < ELEMENTS; begin += 128) {
        const int64_t first = max_i64(flat, begin), end = min_i64(flat + count, begin + 128);
        const ReceiptPart part = {first, max_i64(0, end - first), first - begin};
        memcpy(slice, array + begin * bytes, (size_t)(min_i64(128, ELEMENTS - begin) * bytes));
        sum += receipt_sum(slice, bytes, part);
    }
    return sum;
}

int main(void) {
    static uint64_t words[ELEMENTS];
    for (int64_t bytes = 1; bytes <= 4; bytes *= 2) {
        char *array = (char *)words;
        for (uint64_t i = 0; i < ELEMENTS; i++) words[i] = rng_u64(1, i);
        int differ = 0, blind = 0, leak = 0;
        for (uint64_t i = 0; i < 200; i++) {
            const int64_t flat = (int64_t)(rng_u64(2, i) % 300), count = (int64_t)(rng_u64(3, i) % 300);
            const uint64_t before = sum_of(array, bytes, flat, count);
            differ += before != sum_of_slices(array, bytes, flat, count);
            for (int64_t byte = 0; byte < ELEMENTS * bytes; byte += 7) {
                const bool inside = byte >= flat * bytes && byte < (flat + count) * bytes;
                array[byte] ^= (char)(1 << i % 8);
                const bool changed = sum_of(array, bytes, flat, count) != before;
                array[byte] ^= (char)(1 << i % 8);
                blind += inside && !changed, leak += !inside && changed;
            }
        }
        CHECK(differ == 0, "%lld bytes: slices have the hash of the whole; %d of 200 differ", (long long)bytes, differ);
        CHECK(blind == 0 && leak == 0, "%lld bytes: a bit changes its tensor's hash alone; %d missed, %d of others",
              (long long)bytes, blind, leak);
    }
    return check_report();
}
