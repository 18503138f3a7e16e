// Plan of Hopper's attention backward: how its work is split over thread blocks, and the layout of its workspace.
#ifndef LLMC_ATTENTION_BACKWARD_PLAN_CUH
#define LLMC_ATTENTION_BACKWARD_PLAN_CUH

#include "attention_dims.h"

#define ATTENTION_BACKWARD_KEYS 128       // keys per thread block
#define ATTENTION_BACKWARD_FRAGMENT 4096  // floats of a 64 x 64 fragment tile

// How the work is split over thread blocks.
typedef struct {
    // Query heads that one block sums into its dK and dV; a divisor of the GQA group size. If it is less than the group
    // size, partial sums go through memory.
    int heads_per_block;
    // How many (sequence, key/value head, part of the group) triples form a section; the last may have fewer. Thread
    // blocks take the sections one after the other, so that most of a section's Q, dO and dQ stays in L2. Sections may
    // be larger than L2 in deterministic order, or if one triple is larger than L2.
    int section;
} AttentionBackwardPlan;

// Returns the queries of a step.
HOST_DEVICE static inline int64_t attention_backward_queries(int64_t HD) { return HD == 128 ? 64 : 128; }

// Chooses heads_per_block and section. Few thread blocks leave SMs idle. Many blocks cost a pass over fp32 partial sums
// of dK and dV. So this takes the most heads per block for which the longest block has at most longest_share times an
// SM's average work, with 132 SMs, or one head if there is no such number. (The longest block owns the first keys,
// which every query sees.) A section has at most as many triples as fit in l2_bytes (Q, dO and dQ of one query head for
// each), but at least one. In deterministic order the blocks of one head wait for each other: shorter blocks and larger
// sections are faster. These numbers were found by measurements on an H200 at T 2048 to 8192.
static inline AttentionBackwardPlan attention_backward_plan(AttentionDims d) {
    const double sms = 132, longest_share = d.deterministic ? 0.3 : 1.05, l2_bytes = d.deterministic ? 68e6 : 34e6;
    int64_t group = d.NH / d.NKV, tiles = ceil_div(d.T, ATTENTION_BACKWARD_KEYS);
    AttentionBackwardPlan plan = {1, 1};
    for (int64_t h = 1; h <= group; h++) {
        double longest = (double)(h * tiles), share = (double)(d.B * d.NH) * (double)(tiles * (tiles + 1)) / 2 / sms;
        if (group % h == 0 && longest <= longest_share * share) plan.heads_per_block = (int)h;
    }
    int64_t heads = d.B * d.NH / plan.heads_per_block, fit = max_i64(1, (int64_t)(l2_bytes / (double)(d.T * d.HD * 8)));
    plan.section = (int)ceil_div(heads, ceil_div(heads, fit));  // balanced sections: a small last one leaves SMs idle
    return plan;
}

// Byte offset of each part of the workspace; total: its size.
typedef struct {
    int64_t dq, order, ticket, stats, partial, total;
} AttentionBackwardLayout;

static inline AttentionBackwardLayout attention_backward_layout(AttentionDims d, AttentionBackwardPlan plan) {
    int64_t padded = round_up(d.T, ATTENTION_BACKWARD_KEYS), parts = d.NH / plan.heads_per_block;
    AttentionBackwardLayout at;
    at.dq = 0;                                          // dQ fragments, zeroed and then added to
    at.order = at.dq + d.B * d.NH * padded * d.HD * 4;  // int [B*NH][query tiles][2], zeroed: adds to each dQ fragment
    at.ticket = at.order + d.B * d.NH * (padded / attention_backward_queries(d.HD)) * 2 * 4;  // int, zeroed
    at.stats = round_up(at.ticket + 4, 256);                             // float [B*NH][lse * log2(e), delta][padded]
    at.partial = round_up(at.stats + d.B * d.NH * 2 * padded * 4, 256);  // dK, dV fragments of each part of a group
    at.total = at.partial + (parts > d.NKV ? d.B * parts * padded * d.HD * 2 * 4 : 0);
    return at;
}

// Returns the bytes of device workspace that attention_backward_sm90 needs, for either value of d.deterministic. The
// workspace begins at a multiple of 256 bytes, and its contents do not matter.
static inline int64_t attention_backward_sm90_workspace_bytes(AttentionDims d) {
    AttentionDims fast = d, deterministic = d;
    fast.deterministic = false, deterministic.deterministic = true;
    return max_i64(attention_backward_layout(fast, attention_backward_plan(fast)).total,
                   attention_backward_layout(deterministic, attention_backward_plan(deterministic)).total);
}

#endif
