// When the rank FAULTY_RANK of a test computes wrongly: in its forward pass number FAULTY_PASS, counted from 1, and
// with FAULTY_ALWAYS=1 in all later ones.
#ifndef FAULTY_RANK_H
#define FAULTY_RANK_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static inline bool pass_is_faulty(void) {
    static long passes;
    const char *mine = getenv("RANK"), *rank = getenv("FAULTY_RANK"), *pass = getenv("FAULTY_PASS");
    if (!mine) mine = getenv("OMPI_COMM_WORLD_RANK");
    if (!mine || !rank || !pass || strcmp(mine, rank) != 0) return false;
    passes++;
    return passes == atol(pass) || (getenv("FAULTY_ALWAYS") && passes > atol(pass));
}

#endif
