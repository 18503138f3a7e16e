// The CPU trainer with a rank that flips a bit of the first layer's input (faulty_rank.h): for tests of --replay-every.
#include "faulty_rank.h"

#include "../../../llmc/reference/embedding.h"

static inline void faulty_embedding_forward(float *x, const float *table, const int32_t *tokens, int64_t rows,
                                            int64_t C) {
    embedding_forward_reference(x, table, tokens, rows, C);
    if (pass_is_faulty()) ((uint32_t *)x)[rows * C / 2] ^= 1u << 21;
}

#define embedding_forward_reference faulty_embedding_forward
#include "../../../train_fp8.c"
