// How parameters are split over the ranks of a shard group: which elements each rank keeps, and where.
//
// Each segment (parameters.h) of each unit is cut into `shard_size` slices of equal size, a multiple of
// PARAMETER_ALIGNMENT elements, so that every slice starts 16-byte aligned in any storage type; the last slices of a
// segment may be padding in part or whole. Where the sum of squares must not depend on the number of ranks, slices are
// whole blocks of SHARD_BLOCK elements, and blocks are added up in the order of the flat array. A rank keeps slice
// number `shard_rank` of every segment, in flat shard arrays of `total` elements (weights, moments and gradients
// alike):
//     root vectors | root matrices | root embedding | layer 0 vectors | layer 0 matrices | layer 1 vectors | ...
// An all-gather puts the slices of a segment one after the other. The result has shard_size * slice elements: the
// segment as in the flat array, then padding. With shard_size 1 the shard arrays are the flat arrays of parameters.h,
// with equal offsets.
//
// Two arrays may have another layout. The array of bf16 weights has no matrices of layers if masters_alone
// (weights_begin). The array of gradients has a layout of the trainer's own with --optimizer-in-backward, and on GPUs
// also with FP8 gradients.
//
// A function's argument `l` is a unit: a layer's number, or ROOT for the root unit.
#ifndef LLMC_SHARD_PLAN_H
#define LLMC_SHARD_PLAN_H

#include "parameters.h"

// Elements of a block. On the GPU a block of threads updates them.
#define SHARD_BLOCK 16384

typedef struct {
    int64_t shard_size;                                             // ranks that share one replica of the parameters
    int64_t shard_rank;                                             // number of this rank among them
    int64_t root_slices[NUM_SEGMENTS], layer_slices[NUM_SEGMENTS];  // elements
    int64_t total;                                                  // elements of a rank's flat shard array
    bool in_blocks;      // slices are whole blocks, and each segment has blocks of its own; its last one may be shorter
    bool masters_alone;  // the layers' matrices have no bf16 weights beside their masters (precision_casts_masters)
} ShardPlan;

// The slices of one segment of one unit.
typedef struct {
    int64_t flat;      // first element of the segment in the flat array; random bits of rounding depend on it
    int64_t size;      // elements of the segment
    int64_t slice;     // elements that each rank keeps
    int64_t shard;     // first element of this rank's slice in its flat shard arrays
    int64_t gathered;  // first element of the segment in the gathered unit, whose segments stand one after the other
} ShardSegment;

// The part of a range of the flat array that this rank keeps.
typedef struct {
    int64_t first;  // the part begins at this element of the range, counted from 0
    int64_t count;  // 0: none of it
    int64_t shard;  // first element of the part in the rank's flat shard arrays
} ShardRange;

// The plan of rank `shard_rank` of `shard_size`, with or without blocks. Dies if there is no such rank.
static inline ShardPlan shard_plan_of(const ParameterTable *t, int64_t shard_size, int64_t shard_rank, bool in_blocks) {
    if (shard_size < 1 || shard_rank < 0 || shard_rank >= shard_size)
        die("shard plan: no shard_rank %lld in a shard group of %lld", (long long)shard_rank, (long long)shard_size);
    ShardPlan s = {};
    s.shard_size = shard_size, s.shard_rank = shard_rank, s.in_blocks = in_blocks;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const int64_t multiple = shard_size * (in_blocks && shard_size > 1 ? SHARD_BLOCK : PARAMETER_ALIGNMENT);
        s.root_slices[k] = round_up(t->root_segments[k], multiple) / shard_size;
        s.layer_slices[k] = round_up(t->layer_segments[k], multiple) / shard_size;
        s.total += s.root_slices[k] + t->num_layers * s.layer_slices[k];
    }
    return s;
}

static inline ShardPlan shard_plan(const ParameterTable *t, int64_t shard_size, int64_t shard_rank) {
    return shard_plan_of(t, shard_size, shard_rank, false);
}

// Returns the number of elements that a rank keeps of each segment of a unit [NUM_SEGMENTS].
static inline const int64_t *slice_sizes(const ShardPlan *s, int64_t l) {
    return l == ROOT ? s->root_slices : s->layer_slices;
}

// Elements that a rank keeps of one unit, padding included.
static inline int64_t shard_elements(const ShardPlan *s, int64_t l) {
    return segment_begin(slice_sizes(s, l), NUM_SEGMENTS);
}

// Elements of the gathered unit, padding included.
static inline int64_t gathered_elements(const ShardPlan *s, int64_t l) { return s->shard_size * shard_elements(s, l); }

static inline int64_t shard_largest_slice(const ShardPlan *s) {
    int64_t largest = 0;
    for (int k = 0; k < NUM_SEGMENTS; k++) largest = max_i64(largest, max_i64(s->root_slices[k], s->layer_slices[k]));
    return largest;
}

// First element of a unit's slices in the flat shard arrays.
static inline int64_t shard_begin(const ShardPlan *s, int64_t l) {
    return l == ROOT ? 0 : shard_elements(s, ROOT) + l * shard_elements(s, 0);
}

// Elements of a layer in a rank's array of bf16 weights.
static inline int64_t weights_of_layer(const ShardPlan *s) {
    return s->masters_alone ? s->layer_slices[SEGMENT_VECTORS] : shard_elements(s, 0);
}

// First element of a unit's slices in the array of bf16 weights; if `l` is the number of layers, the number of elements
// of the array. The segments that the array has lie there in the order of the flat shard arrays.
static inline int64_t weights_begin(const ShardPlan *s, int64_t l) {
    return l == ROOT ? 0 : shard_elements(s, ROOT) + l * weights_of_layer(s);
}

// True if the array of bf16 weights has this segment of unit l.
static inline bool weights_have(const ShardPlan *s, int64_t l, int segment) {
    return !s->masters_alone || l == ROOT || segment != SEGMENT_MATRICES;
}

// Returns where the array of bf16 weights holds element `shard` of the flat shard arrays, which is in unit l. The array
// must have the element's segment (weights_have).
static inline int64_t weights_place(const ShardPlan *s, int64_t l, int64_t shard) {
    return weights_begin(s, l) + shard - shard_begin(s, l);
}

// The order in which the backward pass computes the gradients of a flat array (all parameters, or a rank's shard):
// lm_head and the final norm, then the layers from the last to the first, then the embedding, which is last in the
// root. Each of these is walked from its last element to its first. A tied embedding, which is lm_head too, comes last.
typedef struct {
    int64_t embedding, total;  // the embedding's first element, and the end of the array
} BackwardOrder;

// Returns the position of element i in this order. The function is its own inverse: given a position, it returns the
// element there.
HOST_DEVICE static inline int64_t backward_position(BackwardOrder o, int64_t i) {
    return (i < o.embedding ? 0 : o.total) + o.embedding - 1 - i;
}

static inline ShardSegment segment_slice(const ParameterTable *t, const ShardPlan *s, int64_t l, int segment) {
    const int64_t *sizes = segment_sizes(t, l), *slices = slice_sizes(s, l);
    ShardSegment g;
    g.flat = layer_offset(t, l) + segment_begin(sizes, segment);
    g.size = sizes[segment];
    g.slice = slices[segment];
    g.shard = shard_begin(s, l) + segment_begin(slices, segment);
    g.gathered = s->shard_size * segment_begin(slices, segment);
    return g;
}

// Returns the element of the flat array that is element i of this rank's flat shard arrays, which must not be padding.
static inline int64_t shard_to_flat(const ParameterTable *t, const ShardPlan *s, int64_t i) {
    for (int64_t l = t->num_layers - 1;; l--)
        for (int k = NUM_SEGMENTS - 1; k >= 0; k--) {
            const ShardSegment g = segment_slice(t, s, l, k);
            if (i >= g.shard) return g.flat + s->shard_rank * g.slice + i - g.shard;
        }
}

// Converts an element's offset in its unit (as in RootOffsets and LayerOffsets) to its offset in the gathered unit. -1
// stays -1.
static inline int64_t gathered_offset(const ParameterTable *t, const ShardPlan *s, int64_t l, int64_t offset) {
    const int64_t *sizes = segment_sizes(t, l);
    int segment = NUM_SEGMENTS - 1;
    while (segment > 0 && offset < segment_begin(sizes, segment)) segment--;
    return offset + s->shard_size * segment_begin(slice_sizes(s, l), segment) - segment_begin(sizes, segment);
}

static inline BackwardOrder backward_order(const ParameterTable *t) {
    return (BackwardOrder){t->root.embedding, t->total};
}

static inline BackwardOrder shard_backward_order(const ParameterTable *t, const ShardPlan *s) {
    return (BackwardOrder){segment_slice(t, s, ROOT, embedding_segment(t)).shard, s->total};
}

// Returns this rank's part of `count` elements from element `flat` of the flat array on. Dies if they do not all lie in
// segment `segment` of unit `l`.
static inline ShardRange segment_range(const ParameterTable *t, const ShardPlan *s, int64_t l, int segment,
                                       int64_t flat, int64_t count) {
    const ShardSegment g = segment_slice(t, s, l, segment);
    if (flat < g.flat || count < 0 || flat + count > g.flat + g.size)
        die("shard plan: %lld elements from %lld on do not all lie in segment %d of layer %lld (-1: the root)",
            (long long)count, (long long)flat, segment, (long long)l);
    const int64_t slice_begin = g.flat + s->shard_rank * g.slice, begin = max_i64(flat, slice_begin),
                  end = min_i64(flat + count, slice_begin + g.slice);
    ShardRange r = {begin - flat, end - begin, g.shard + begin - slice_begin};
    if (r.count <= 0) r.first = r.count = r.shard = 0;
    return r;
}

// Returns this rank's part of `count` elements of layer l's matrices, from element `offset` of the matrices on.
static inline ShardRange shard_matrix(const ParameterTable *t, const ShardPlan *s, int64_t l, int64_t offset,
                                      int64_t count) {
    const int64_t matrices = segment_slice(t, s, l, SEGMENT_MATRICES).flat;
    return segment_range(t, s, l, SEGMENT_MATRICES, matrices + offset, count);
}

// Returns this rank's part of one parameter. ShardRange.first counts from the parameter's first element.
static inline ShardRange shard_parameter(const ParameterTable *t, const ShardPlan *s, const Parameter *p) {
    return segment_range(t, s, p->layer, parameter_segment(p), p->offset, parameter_elements(p));
}

// Returns the index of the parameter that element `shard` of this rank's flat shard arrays belongs to; -1: padding.
static inline int64_t shard_parameter_at(const ParameterTable *t, const ShardPlan *s, int64_t shard) {
    for (int64_t i = 0; i < t->count; i++) {
        const ShardRange r = shard_parameter(t, s, &t->entries[i]);
        if (shard >= r.shard && shard < r.shard + r.count) return i;
    }
    return -1;
}

#endif
