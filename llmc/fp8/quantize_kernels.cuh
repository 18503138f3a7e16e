// FP8 casts with one scale for the whole tensor, and sources: structs that supply the values to cast.
//
//    scale     = what out.rule makes from the amax, or *out.delayed_scale    (in each thread block of the cast)
//    code      = saturating RNE cast of fp32(x) * scale
//    scale_inv = 1 / scale, for the GEMM
//
// Current scaling must know the amax before the first element is cast, so it takes two passes. The kernel that produces
// the tensor may be the first pass. With a delayed scale one pass casts and finds the amax for later scales. The cast
// writes rowwise data, columnwise (transposed) data, or both in one pass, because FP8 GEMMs on Hopper need the
// contraction index contiguous in both operands: 2 bytes read, 1 + 1 written per element.
//
// The cast is a template over the source of the bf16 values, so that a norm or SwiGLU can be recomputed in the cast
// instead of stored: rmsnorm.cuh and swiglu.cuh have such sources. Sizes: any number of rows, columns a multiple of 16;
// pointers aligned to 16 bytes. Rows of columnwise data are R bytes long: GEMMs need R to be a multiple of 16 too, and
// then the cast is faster (whole 16-byte stores).
#ifndef LLMC_QUANTIZE_KERNELS_CUH
#define LLMC_QUANTIZE_KERNELS_CUH

#include "amax.cuh"
#include "qtensor.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Cast and transpose
//
// A thread block casts a tile of 128 x 128 with 256 threads. A thread loads 4 rows x 8 columns by 16-byte accesses,
// twice (rows +0 and +64), stores 8 bytes of each row, and transposes two 4 x 4 squares of bytes; each resulting word
// is 4 rows of one column. Words go to shared memory as [column][row / 4], at index (row / 4) ^ (2 * (column / 8)), so
// the 32 words that a warp stores at once are in different banks. 8 threads read a column back and store its 128 bytes;
// the exclusive or permutes a column's 16-byte chunks, and for odd column / 8 swaps their halves.
//
// A Source is a struct of pointers with
//    ROLES         the roles (x, w, dy) that it is cast for, as bits 1 << TensorRole. Kernels for E5M2 are compiled
//                  only for sources with role dy, and kernels for 128x128 blocks only for sources with role w
//    INPUTS        number of bf16 tensors of R x C elements that it reads
//    OUTPUTS       number of outputs side by side in one tensor [R, OUTPUTS * C]: output o is columns
//                  [o * C, (o + 1) * C)
//    MIN_BLOCKS    minimum occupancy in blocks per SM; limits registers
//    GROUPS_AHEAD  1 or 2: how many of the two groups of 4 rows a thread loads at once
//    AMAX          true if values() also raises an amax, which goes to the member amax_slot
//    Column        data that depends on the column only; load_column() loads it
//    Raw           the inputs for 8 columns of one row; load() loads them
//    values()      computes 8 values of each output from a Raw and a Column

enum { CAST_TILE = 128, CAST_THREADS = 256, CAST_COLUMN_THREADS = CAST_TILE / 8, CAST_WORDS = CAST_TILE / 4 };
enum { CAST_GROUP_ROWS = 64, CAST_GROUPS = CAST_TILE / CAST_GROUP_ROWS };

// m[i] holds the bytes of row i, columns 0..3, and becomes column i, rows 0..3.
__device__ static inline void transpose_bytes_4x4(uint32_t m[4]) {
    uint32_t a = __byte_perm(m[0], m[1], 0x5140), b = __byte_perm(m[2], m[3], 0x5140);
    uint32_t c = __byte_perm(m[0], m[1], 0x7362), d = __byte_perm(m[2], m[3], 0x7362);
    m[0] = __byte_perm(a, b, 0x5410);
    m[1] = __byte_perm(a, b, 0x7632);
    m[2] = __byte_perm(c, d, 0x5410);
    m[3] = __byte_perm(c, d, 0x7632);
}

// Casts 8 values to 8 codes: .x holds columns 0..3, .y columns 4..7.
template <Fp8Format FORMAT>
__device__ static inline uint2 fp8x8_from_bf16(Bf16x8 v, float scale) {
    float f[8];
    bf16x8_unpack(f, v);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = __fmul_rn(f[i], scale);
    return make_uint2(fp8x4_from_floats<FORMAT>(f), fp8x4_from_floats<FORMAT>(f + 4));
}

// Stores the 16 codes of rows [row, row + 16) of one column, words in row order, to the columnwise data. Leaves out
// rows from R on.
__device__ static inline void store_column_chunk(uint8_t *to, uint4 codes, int64_t row, int64_t R) {
    if (R % 16 == 0) {
        if (row < R) *(uint4 *)(to + row) = codes;
        return;
    }
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (row + i < R) to[row + i] = (uint8_t)(word[i / 4] >> (8 * (i % 4)));
}

// First half of a tile's transpose: writes a thread's codes of 4 rows (columns 0..3 of its 8 in `low`, 4..7 in `high`)
// transposed to shared memory.
__device__ static inline void put_tile_words(uint32_t (*tile)[CAST_WORDS], uint32_t low[4], uint32_t high[4],
                                             int group) {
    const int tx = threadIdx.x % CAST_COLUMN_THREADS, ty = threadIdx.x / CAST_COLUMN_THREADS;
    transpose_bytes_4x4(low);
    transpose_bytes_4x4(high);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        tile[8 * tx + k][(16 * group + ty) ^ (2 * tx)] = low[k];
        tile[8 * tx + 4 + k][(16 * group + ty) ^ (2 * tx)] = high[k];
    }
}

// Second half of a tile's transpose: copies shared memory to the columnwise data.
template <int OUTPUTS>
__device__ static inline void store_tile_columns(uint8_t *col, const uint32_t (*tile)[CAST_TILE][CAST_WORDS],
                                                 int64_t first_row, int64_t first_column, int64_t R, int64_t C) {
#pragma unroll
    for (int i = 0; i < OUTPUTS * CAST_TILE * CAST_WORDS / 4 / CAST_THREADS; i++) {
        const int unit = i * CAST_THREADS + (int)threadIdx.x, output = unit / (CAST_TILE * 8),
                  column = unit / 8 % CAST_TILE, chunk = unit % 8;
        if (first_column + column >= C) continue;
        const int moved = 2 * (column / 8);
        uint4 w = *(const uint4 *)&tile[output][column][4 * chunk];
        if (moved & 2) w = make_uint4(w.z, w.w, w.x, w.y);
        store_column_chunk(col + (output * C + first_column + column) * R, w, first_row + 16 * (chunk ^ (moved >> 2)),
                           R);
    }
}

// Casts one thread's 4 rows x 8 columns of each output. If `out` has rowwise data, the codes go there. If it has
// columnwise data, they go, transposed, to shared memory. `group` is the half of the tile that has these rows: 0 is the
// upper 64 rows, 1 the lower 64.
template <class Source, Fp8Format FORMAT, bool DELAYED>
__device__ static inline void quantize_group(uint32_t (*tile)[CAST_TILE][CAST_WORDS], const Source &source,
                                             const QTensor &out, float scale, const typename Source::Raw raw[4],
                                             const typename Source::Column &of_column, int group, int64_t row,
                                             int64_t column, int64_t R, int64_t C, uint32_t *packed_amax) {
    uint32_t low[Source::OUTPUTS][4], high[Source::OUTPUTS][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        Bf16x8 v[Source::OUTPUTS];
        source.values(v, raw[j], of_column, packed_amax);
#pragma unroll
        for (int o = 0; o < Source::OUTPUTS; o++) {
            if (DELAYED) *packed_amax = amax_update<false>(*packed_amax, v[o]);
            const uint2 codes = fp8x8_from_bf16<FORMAT>(v[o], scale);
            low[o][j] = codes.x, high[o][j] = codes.y;
            if (out.rowwise && column < C && row + j < R)
                *(uint2 *)(out.rowwise + ((row + j) * Source::OUTPUTS + o) * C + column) = codes;
        }
    }
    if (!out.columnwise) return;
#pragma unroll
    for (int o = 0; o < Source::OUTPUTS; o++) put_tile_words(tile[o], low[o], high[o], group);
}

// Thread blocks process the tiles from the last to the first, because the end of the tensor, which the previous kernel
// touched last, is probably still in L2. A source with AMAX goes from the first to the last: its cast is also the amax
// pass of another tensor, whose cast comes next and begins at the end.
template <class Source, Fp8Format FORMAT, bool DELAYED>
static __global__ void __launch_bounds__(CAST_THREADS, Source::MIN_BLOCKS)
    quantize_transpose_kernel(const Source source, const QTensor out, int64_t R, int64_t C) {
    grid_dependency_wait();
    __shared__ __align__(16) uint32_t tile[Source::OUTPUTS][CAST_TILE][CAST_WORDS];
    const unsigned column_tiles = (unsigned)ceil_div(C, CAST_TILE),
                   index = Source::AMAX ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const int64_t first_row = (int64_t)(index / column_tiles) * CAST_TILE,
                  first_column = (int64_t)(index % column_tiles) * CAST_TILE;
    const int tx = threadIdx.x % CAST_COLUMN_THREADS, ty = threadIdx.x / CAST_COLUMN_THREADS;
    const int64_t column = first_column + 8 * tx;
    const float known = DELAYED ? *out.delayed_scale : __uint_as_float(*out.amax);
    typename Source::Column of_column = {};
    if (column < C) source.load_column(&of_column, column);
    uint32_t packed_amax = 0;
    float scale = 0;
#pragma unroll
    for (int g0 = 0; g0 < CAST_GROUPS; g0 += Source::GROUPS_AHEAD) {
        typename Source::Raw raw[Source::GROUPS_AHEAD][4] = {};
#pragma unroll
        for (int i = 0; i < 4 * Source::GROUPS_AHEAD; i++) {
            const int64_t row = first_row + (g0 + i / 4) * CAST_GROUP_ROWS + 4 * ty + i % 4;
            if (column < C && row < R) source.load(&raw[i / 4][i % 4], row, column);
        }
        if (g0 == 0)
            scale = DELAYED ? known : out.rule == SCALE_TE ? fp8_scale_te(known, FORMAT, 0) : fp8_scale(known, FORMAT);
#pragma unroll
        for (int g = g0; g < g0 + Source::GROUPS_AHEAD; g++)
            quantize_group<Source, FORMAT, DELAYED>(tile, source, out, scale, raw[g - g0], of_column, g,
                                                    first_row + g * CAST_GROUP_ROWS + 4 * ty, column, R, C,
                                                    &packed_amax);
    }
    if constexpr (Source::AMAX) amax_publish(source.amax_slot, packed_amax);
    if constexpr (DELAYED) amax_publish(out.amax, packed_amax);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (out.rowwise) *(float *)out.rowwise_scale_inv = __frcp_rn(scale);
        if (out.columnwise) *(float *)out.columnwise_scale_inv = __frcp_rn(scale);
    }
    if (!out.columnwise) return;
    __syncthreads();
    store_tile_columns<Source::OUTPUTS>(out.columnwise, tile, first_row, first_column, R, C);
}

// Launches the cast of a source with C columns per output. Without a delayed scale, out.rule is SCALE_TORCHAO or
// SCALE_TE. Dies if a source with AMAX has a delayed scale.
template <class Source, Fp8Format FORMAT>
static inline void quantize_transpose_launch(const QTensor &out, const Source &source, int64_t R, int64_t C,
                                             cudaStream_t stream) {
    const unsigned blocks = grid_size(ceil_div(R, CAST_TILE) * ceil_div(C, CAST_TILE), 1);
    if (!out.delayed_scale)
        CUDA_LAUNCH(quantize_transpose_kernel<Source, FORMAT, false>, blocks, CAST_THREADS, 0, stream, source, out, R,
                    C);
    else if constexpr (!Source::AMAX)
        CUDA_LAUNCH(quantize_transpose_kernel<Source, FORMAT, true>, blocks, CAST_THREADS, 0, stream, source, out, R,
                    C);
    else
        die("quantize_transpose_launch: this source raises another tensor's amax, so it has no cast with a delayed "
            "scale");
}

// The source of values that are in memory.
struct TensorSource {
    enum {
        ROLES = 1 << TENSOR_X | 1 << TENSOR_W | 1 << TENSOR_DY,
        INPUTS = 1,
        OUTPUTS = 1,
        MIN_BLOCKS = 4,
        GROUPS_AHEAD = 2,
        AMAX = 0
    };
    typedef Bf16x8 Raw;
    struct Column {};
    const bf16 *x;
    int64_t C;
    __device__ void load_column(Column *, int64_t) const {}
    __device__ void load(Raw *raw, int64_t row, int64_t column) const { *raw = bf16x8_load(x + row * C + column); }
    __device__ void values(Bf16x8 v[1], const Raw &raw, const Column &, uint32_t *) const { v[0] = raw; }
};

#endif
