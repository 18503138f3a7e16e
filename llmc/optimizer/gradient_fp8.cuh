// Gradients in FP8 on the GPU (--grad-accum-dtype fp8, --reduce-dtype fp8), bit-identical to the CPU (gradient_fp8.h).
//
// Backward computes a layer's gradients in bf16, in a buffer. The first pass finds the amax of each matrix, or of its
// sum with the stored gradient; the second casts to codes with the new scales. If several ranks need one scale, the
// amaxes are reduced over these ranks between the passes (fsdp_gradient_fp8.cuh). A last kernel, which moves almost
// nothing, stores the scales. Bytes per element of a bf16 gradient: the first pass reads 2, the second reads 2 and
// writes 1. In later micro-steps each pass also reads the 1 byte of the stored code. If ranks have sent codes, each
// pass reads 1 from each rank in place of the 2.
//
// The codes of all layers lie one behind the other. The gradients that stay bf16 have memory of their own: the root's,
// and behind them those of the vectors of each layer.
#ifndef LLMC_GRADIENT_FP8_CUH
#define LLMC_GRADIENT_FP8_CUH

#include "../config/shard_plan.h"
#include "../reference/gradient_fp8.h"
#include "../gpu/cuda_utils.cuh"

enum { GRADIENT_FP8_MOST = 8, GRADIENT_FP8_THREADS = 256, GRADIENT_FP8_BLOCKS = 264 };

// A rank's part of a matrix: elements [begin, end) of what the rank keeps of the layer's matrices. begin == end: the
// rank keeps none of the matrix. `entry`: index of the matrix among the layer's entries of the parameter table.
typedef struct {
    int64_t begin, end, entry;
} GradientFp8Tensor;

// The layout of a rank's gradients. A layer has `entries` entries of the parameter table, and those of layer l, with
// their scales and amaxes, begin at first_entry + l * entries.
typedef struct {
    int64_t root, vectors, matrices;  // elements of the root, and of a layer's vectors and matrices, padding included
    int64_t layers, first_entry, entries;
    int count;  // matrices of a layer
    GradientFp8Tensor tensors[GRADIENT_FP8_MOST];
} GradientFp8Layout;

// FP8 gradients in device memory. All ranks of a shard group have equal scales. Codes of padding are zero.
typedef struct {
    uint8_t *codes;    // [layers][matrices]; NULL: gradients are not FP8
    float *scale_inv;  // [entries of the parameter table]
    uint32_t *amaxes;  // [entries of the parameter table] fp32 bits; zero between casts
} GradientFp8;

// The gradients of a layer that a cast reads: bf16, or codes with their scales. The codes may be those of several
// ranks, which all have the same scales; the cast then reads the ranks' sum (gradient_fp8_sum).
typedef struct {
    const bf16 *data;        // NULL: the cast reads codes
    const uint8_t *codes;    // this rank's, laid out like the codes that the cast writes
    const float *scale_inv;  // [entries of the layer]
    const uint8_t *others;   // [ranks - 1][stride] codes of the other ranks, in the order of ranks
    int64_t stride;          // a multiple of 8
    int64_t begin;           // others[r][0] is element `begin` of the codes that the cast writes; a multiple of 8
    int64_t ranks, rank;     // number of ranks, this one included; index of this rank
} GradientFp8Source;

// Returns the layout of this rank's slices, or, if `gathered`, of whole layers as backward computes them. Dies if a
// layer has more than GRADIENT_FP8_MOST matrices, or if a matrix's part does not begin and end at multiples of 8
// elements, or does not begin where the part before it ends.
static inline GradientFp8Layout gradient_fp8_layout(const ParameterTable *t, const ShardPlan *s, bool gathered) {
    GradientFp8Layout a;
    memset(&a, 0, sizeof a);
    const ShardSegment g = segment_slice(t, s, 0, SEGMENT_MATRICES);
    const int64_t slices = gathered ? s->shard_size : 1, kept = slices * g.slice,
                  first = gathered ? 0 : s->shard_rank * g.slice;
    a.root = slices * shard_elements(s, ROOT), a.vectors = slices * s->layer_slices[SEGMENT_VECTORS];
    a.matrices = kept, a.layers = t->num_layers;
    while (t->entries[a.first_entry].layer != 0) a.first_entry++;
    a.entries = (t->count - a.first_entry) / t->num_layers;
    for (int64_t i = 0; i < a.entries; i++) {
        const Parameter *p = &t->entries[a.first_entry + i];
        if (!(p->flags & PARAM_FP8)) continue;
        if (a.count == GRADIENT_FP8_MOST) die("a layer has more than %d matrices", GRADIENT_FP8_MOST);
        const int64_t begin = p->offset - g.flat - first, end = begin + parameter_elements(p);
        const GradientFp8Tensor here = {max_i64(0, min_i64(begin, kept)), max_i64(0, min_i64(end, kept)), i};
        if (here.begin % 8 || here.end % 8 || here.begin != (a.count ? a.tensors[a.count - 1].end : 0))
            die("FP8 gradients need matrices of multiples of 8 elements, without padding between them");
        a.tensors[a.count++] = here;
    }
    return a;
}

// Returns the FP8 gradients of layer l: pointers to its codes, scales and amaxes.
static inline GradientFp8 gradient_fp8_of_layer(GradientFp8 g, const GradientFp8Layout *a, int64_t l) {
    const int64_t entry = a->first_entry + l * a->entries;
    return GradientFp8{g.codes + l * a->matrices, g.scale_inv + entry, g.amaxes + entry};
}

// ---- casts

// Loads 8 gradients of a layer. With CODES they are the sum of all ranks' codes with scale_inv from_inv, else
// from.data. With ADD, adds the stored gradients, which are `codes` with scale_inv.
template <bool ADD, bool CODES>
__device__ static inline void gradient_fp8_load(float x[8], const GradientFp8Source &from, float from_inv,
                                                const uint8_t *codes, float scale_inv, int64_t i) {
    if (CODES) {
        const uint8_t *others = from.others + i - from.begin;
        fp8x8_to_floats(x, *(const uint2 *)(from.rank == 0 ? from.codes + i : others));
        for (int64_t r = 1; r < from.ranks; r++) {
            float y[8];
            fp8x8_to_floats(
                y, *(const uint2 *)(r == from.rank ? from.codes + i : others + (r - (r > from.rank)) * from.stride));
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] += y[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __fmul_rn(x[j], from_inv);
    } else {
        bf16x8_unpack(x, bf16x8_load(from.data + i));
    }
    if (!ADD) return;
    float before[8];
    fp8x8_to_floats(before, *(const uint2 *)(codes + i));
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] += __fmul_rn(before[j], scale_inv);
}

// Raises to.amaxes to the amaxes of a layer's gradients, one for each matrix. With ADD, the stored gradients are added
// first. blockIdx.y is the matrix.
template <bool ADD, bool CODES>
static __global__ void __launch_bounds__(GRADIENT_FP8_THREADS)
    gradient_fp8_amax_kernel(GradientFp8 to, GradientFp8Source from, const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    const GradientFp8Tensor t = a.tensors[blockIdx.y];
    const float scale_inv = ADD ? to.scale_inv[t.entry] : 0, from_inv = CODES ? from.scale_inv[t.entry] : 0;
    uint32_t amax = 0;
    for (int64_t i = t.begin + (blockIdx.x * GRADIENT_FP8_THREADS + threadIdx.x) * 8; i < t.end;
         i += (int64_t)gridDim.x * GRADIENT_FP8_THREADS * 8) {
        float x[8];
        gradient_fp8_load<ADD, CODES>(x, from, from_inv, to.codes, scale_inv, i);
#pragma unroll
        for (int j = 0; j < 8; j++) amax = max(amax, gradient_fp8_bits(x[j]));
    }
    amax = warp_max_u32(amax);
    uint32_t *slot = to.amaxes + t.entry;
    if (threadIdx.x % WARP_SIZE == 0 && amax > *(volatile uint32_t *)slot) atomicMax(slot, amax);
}

// Casts the gradients of each matrix of a layer to to.codes. With ADD, the stored gradients are added first, and the
// sums are rounded stochastically, with the random bits of how.key for elements from how.flat on. A matrix's scale is
// the one for its amax. from.codes may be to.codes. blockIdx.y is the matrix.
template <bool ADD, bool CODES>
static __global__ void __launch_bounds__(GRADIENT_FP8_THREADS)
    gradient_fp8_cast_kernel(GradientFp8 to, GradientFp8Source from, GradientSum how,
                             const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    __shared__ float scale;
    const GradientFp8Tensor t = a.tensors[blockIdx.y];
    const float scale_inv = ADD ? to.scale_inv[t.entry] : 0, from_inv = CODES ? from.scale_inv[t.entry] : 0;
    const bool finite = to.amaxes[t.entry] < 0x7f800000u;
    if (threadIdx.x == 0) scale = gradient_fp8_scale(to.amaxes[t.entry]);
    __syncthreads();
    for (int64_t i = t.begin + (blockIdx.x * GRADIENT_FP8_THREADS + threadIdx.x) * 8; i < t.end;
         i += (int64_t)gridDim.x * GRADIENT_FP8_THREADS * 8) {
        float x[8];
        gradient_fp8_load<ADD, CODES>(x, from, from_inv, to.codes, scale_inv, i);
        const uint32_t hash = ADD ? adamw_random_group(how.key, (how.flat + i) >> 3) : 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float scaled = __fmul_rn(x[j], scale), code = ADD ? gradient_fp8_stochastic(scaled, hash, j) : scaled;
            x[j] = finite || gradient_fp8_bits(x[j]) < 0x7f800000u ? code : NAN;
        }
        *(uint2 *)(to.codes + i) = make_uint2(fp8x4_from_floats<FP8_E4M3>(x), fp8x4_from_floats<FP8_E4M3>(x + 4));
    }
}

// Stores scale_inv of the scales that the cast has used, and clears the amaxes.
static __global__ void gradient_fp8_scales_kernel(GradientFp8 to, const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    if (threadIdx.x >= a.count) return;
    const int64_t entry = a.tensors[threadIdx.x].entry;
    to.scale_inv[entry] = 1 / gradient_fp8_scale(to.amaxes[entry]);
    to.amaxes[entry] = 0;
}

static inline dim3 gradient_fp8_grid(const GradientFp8Layout *a) {
    return dim3(min_i64(GRADIENT_FP8_BLOCKS, grid_size(a->matrices, GRADIENT_FP8_THREADS * 8)), (unsigned)a->count);
}

static inline void gradient_fp8_require_aligned(GradientFp8 to, GradientFp8Source from) {
    require_aligned16(to.codes, "gradient_fp8", "codes");
    require_aligned16(from.data ? (const void *)from.data : from.codes, "gradient_fp8", "gradients");
    if (from.ranks > 1 && (from.stride % 8 || from.begin % 8))
        die("gradient_fp8: parts of ranks are not multiples of 8 codes");
}

// Raises to.amaxes, the amaxes of a layer's matrices, to those of the gradients `from`; if `add`, to those of their
// sums with the stored gradients.
static inline void gradient_fp8_amaxes(GradientFp8 to, const GradientFp8Layout *a, GradientFp8Source from, bool add,
                                       cudaStream_t stream) {
    const bool codes = !from.data;
    const auto kernel = add && codes ? gradient_fp8_amax_kernel<true, true>
                        : add        ? gradient_fp8_amax_kernel<true, false>
                        : codes      ? gradient_fp8_amax_kernel<false, true>
                                     : gradient_fp8_amax_kernel<false, false>;
    gradient_fp8_require_aligned(to, from);
    CUDA_LAUNCH(kernel, gradient_fp8_grid(a), GRADIENT_FP8_THREADS, 0, stream, to, from, *a);
}

// Stores the gradients `from` of a layer's matrices in `to`; if how.add, their sums with the stored gradients, rounded
// stochastically (gradient_fp8_round). how.flat: index of the first of the rank's matrices in the flat array. A
// matrix's scale is the one for its amax, which gradient_fp8_amaxes has found. Clears the amaxes.
static inline void gradient_fp8_cast(GradientFp8 to, const GradientFp8Layout *a, GradientFp8Source from,
                                     GradientSum how, cudaStream_t stream) {
    const bool codes = !from.data;
    const auto kernel = how.add && codes ? gradient_fp8_cast_kernel<true, true>
                        : how.add        ? gradient_fp8_cast_kernel<true, false>
                        : codes          ? gradient_fp8_cast_kernel<false, true>
                                         : gradient_fp8_cast_kernel<false, false>;
    gradient_fp8_require_aligned(to, from);
    CUDA_LAUNCH(kernel, gradient_fp8_grid(a), GRADIENT_FP8_THREADS, 0, stream, to, from, how, *a);
    CUDA_LAUNCH(gradient_fp8_scales_kernel, 1, GRADIENT_FP8_MOST, 0, stream, to, *a);
}

// Returns bf16 gradients to cast.
static inline GradientFp8Source gradient_fp8_of_bf16(const bf16 *data) {
    GradientFp8Source from = {};
    from.data = data;
    return from;
}

// Returns codes to cast, of one rank.
static inline GradientFp8Source gradient_fp8_of_codes(GradientFp8 g) {
    return GradientFp8Source{NULL, g.codes, g.scale_inv, NULL, 0, 0, 1, 0};
}

// Stores the gradients of layer l's matrices as FP8; if how.add, their sums with the stored gradients. Only for ranks
// that hold whole tensors, because no amax is reduced over ranks. Returns the bytes moved.
static inline int64_t gradient_fp8_join(GradientFp8 to, const GradientFp8Layout *a, int64_t l, const bf16 *gradients,
                                        GradientSum how, cudaStream_t stream) {
    const GradientFp8 layer = gradient_fp8_of_layer(to, a, l);
    const GradientFp8Source from = gradient_fp8_of_bf16(gradients);
    gradient_fp8_amaxes(layer, a, from, how.add, stream);
    gradient_fp8_cast(layer, a, from, how, stream);
    return a->matrices * (how.add ? 7 : 5);
}

// Returns the layout of elements [begin, end) of what the rank keeps of a layer's matrices; their indices stay.
static inline GradientFp8Layout gradient_fp8_part(const GradientFp8Layout *a, int64_t begin, int64_t end) {
    GradientFp8Layout part = *a;
    for (int k = 0; k < a->count; k++) {
        GradientFp8Tensor *t = &part.tensors[k];
        t->begin = min_i64(max_i64(t->begin, begin), end), t->end = max_i64(min_i64(t->end, end), t->begin);
    }
    return part;
}

// Computes gradient_fp8_to_bf16. blockIdx.y is the matrix.
static __global__ void __launch_bounds__(GRADIENT_FP8_THREADS)
    gradient_fp8_decode_kernel(bf16 *to, GradientFp8 from, const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    const GradientFp8Tensor t = a.tensors[blockIdx.y];
    const float scale_inv = from.scale_inv[t.entry];
    for (int64_t i = t.begin + (blockIdx.x * GRADIENT_FP8_THREADS + threadIdx.x) * 8; i < t.end;
         i += (int64_t)gridDim.x * GRADIENT_FP8_THREADS * 8) {
        float x[8];
        fp8x8_to_floats(x, *(const uint2 *)(from.codes + i));
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __fmul_rn(x[j], scale_inv);
        bf16x8_store(to + i, bf16x8_pack(x));
    }
}

// to [matrices] = the values of a layer's codes, rounded to bf16. Padding is left as it is.
static inline void gradient_fp8_to_bf16(bf16 *to, GradientFp8 from, const GradientFp8Layout *a, cudaStream_t stream) {
    CUDA_LAUNCH(gradient_fp8_decode_kernel, gradient_fp8_grid(a), GRADIENT_FP8_THREADS, 0, stream, to, from, *a);
}

// ---- reading

// Reads a rank's gradients by their index in its flat shard arrays. It is slow, and only the search for large gradients
// uses it, after a step whose gradient norm is not accepted.
typedef struct {
    const bf16 *data;
    const uint8_t *codes;
    const float *scale_inv;
    GradientFp8Layout layout;

    __device__ float operator[](int64_t i) const {
        const int64_t in_layers = i - layout.root, unit = layout.vectors + layout.matrices;
        if (in_layers < 0) return __bfloat162float(data[i]);
        const int64_t l = in_layers / unit, in_unit = in_layers % unit, at = in_unit - layout.vectors;
        if (at < 0) return __bfloat162float(data[layout.root + l * layout.vectors + in_unit]);
        int t = 0;
        while (t < layout.count && at >= layout.tensors[t].end) t++;
        if (t == layout.count || at < layout.tensors[t].begin) return 0;  // padding
        const int64_t entry = layout.first_entry + l * layout.entries + layout.tensors[t].entry;
        return gradient_fp8_value(codes[l * layout.matrices + at], scale_inv[entry]);
    }
} GradientFp8Reader;

#endif
