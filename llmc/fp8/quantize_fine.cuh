// FP8 casts with scales finer than a tensor, and the amaxes that some of them need first.
//
//    1x128, 128x128, 1x32   one pass: a tile holds whole blocks, so the cast finds their amaxes itself
//    row                    two passes: amaxes of all rows (for rowwise data) and columns (for columnwise data), then
//                           the cast
//    tensor broadcast       two passes: the amax of the tensor, then a cast that writes scale_inv once for each row
//
// All passes use the tiles of the tensorwise cast (see "Cast and transpose" in quantize_kernels.cuh). A cast keeps its
// tile's values in registers as bf16 until the thread block has computed the scales. So a cast of a tensor in memory to
// rowwise and columnwise data reads 2 bytes and writes 1 + 1 per element. Except for 128x128, these data have different
// scales and so different codes: each value is cast twice. Each granularity uses the scale rule of the recipes that
// have it.
//
// At ragged edges threads read the last row or columns again: duplicate values change no maximum.
#ifndef LLMC_QUANTIZE_FINE_CUH
#define LLMC_QUANTIZE_FINE_CUH

#include "quantize_kernels.cuh"

static_assert(NO_SCALE < PER_ROW && PER_TENSOR < PER_ROW && PER_TENSOR_BROADCAST < PER_ROW && PER_ROW < BLOCK_1X128 &&
                  PER_ROW < BLOCK_128X128 && PER_ROW < BLOCK_1X32,
              "these kernels cast PER_ROW and what comes after it");
static_assert(CAST_TILE % 128 == 0, "a tile holds whole blocks");

// Amaxes in device memory. `rows` has one for each row of the tensor, for rowwise data; `columns` has one for each
// column, for columnwise data. If `rows` or `columns` is NULL, the cast to its data uses the amax of the whole tensor.
typedef struct {
    uint32_t *rows, *columns, *tensor;
} FineAmaxes;

// Returns the scale rule of a granularity. For PER_TENSOR_BROADCAST call it with PER_ROW. fine_keeps_nan is
// fp8_rule_keeps_nan() of the rule, as a constant for template arguments.
__host__ __device__ constexpr ScaleRule fine_rule(ScaleGranularity g) {
    return g == PER_ROW ? SCALE_TORCHAO_POW2 : g == BLOCK_1X32 ? SCALE_MX : SCALE_TE_POW2;
}
__host__ __device__ constexpr bool fine_keeps_nan(ScaleGranularity g) { return fine_rule(g) != SCALE_TE_POW2; }

// A tile's first row and column, in a source of R rows and C columns per output.
typedef struct {
    int64_t row, column, R, C;
} FinePosition;

enum { FINE_WARPS = CAST_THREADS / WARP_SIZE, FINE_PAIRS = CAST_TILE / 2 };

// Shared memory of a tile's partial maxima, bf16 magnitudes of 16 bits. BLOCKS scale blocks lie along each row and each
// column of the tile: 4 for 1x32, else 1. A warp holds 8 rows of each group. `columns` has, for each warp and group,
// the maximum of each column over these 8 rows; if BLOCKS is 1, for each warp over the 16 rows of both groups. `rows`
// has the maximum of each row over the columns of a scale block.
template <int OUTPUTS, int BLOCKS>
struct FineMaxima {
    uint32_t columns[OUTPUTS][BLOCKS == 1 ? FINE_WARPS : CAST_GROUPS * FINE_WARPS][FINE_PAIRS];
    uint16_t rows[OUTPUTS][BLOCKS][CAST_TILE];
};

// Shared memory of a tile. The codes reuse the memory of the maxima, which are dead by then.
template <int OUTPUTS, int BLOCKS>
struct FineShared {
    union {
        uint32_t codes[OUTPUTS][CAST_TILE][CAST_WORDS];
        FineMaxima<OUTPUTS, BLOCKS> maxima;
    };
    // Indices: [output][scale block along depth][row or column].
    float row_scales[OUTPUTS][BLOCKS][CAST_TILE], column_scales[OUTPUTS][BLOCKS][CAST_TILE];
    uint32_t warp_maxima[FINE_WARPS];
};

// ---- values and their maxima

// Loads this thread's 8 rows x 8 columns of every output.
template <class Source>
__device__ static inline void fine_load(Bf16x8 v[Source::OUTPUTS][CAST_GROUPS][4], const Source &source,
                                        const FinePosition &at) {
    const int tx = threadIdx.x % CAST_COLUMN_THREADS, ty = threadIdx.x / CAST_COLUMN_THREADS;
    const int64_t column = min(at.column + 8 * tx, at.C - 8);
    typename Source::Column of_column;
    source.load_column(&of_column, column);
#pragma unroll
    for (int g0 = 0; g0 < CAST_GROUPS; g0 += Source::GROUPS_AHEAD) {
        typename Source::Raw raw[4 * Source::GROUPS_AHEAD];
#pragma unroll
        for (int i = 0; i < 4 * Source::GROUPS_AHEAD; i++)
            source.load(&raw[i], min(at.row + (g0 + i / 4) * CAST_GROUP_ROWS + 4 * ty + i % 4, at.R - 1), column);
#pragma unroll
        for (int i = 0; i < 4 * Source::GROUPS_AHEAD; i++) {
            Bf16x8 values[Source::OUTPUTS];
            uint32_t unused = 0;
            source.values(values, raw[i], of_column, &unused);
#pragma unroll
            for (int o = 0; o < Source::OUTPUTS; o++) v[o][g0 + i / 4][i % 4] = values[o];
        }
    }
}

// Returns, in half j % 2 of word j / 2, the maximum of row 4 * ty + j of the group over the columns of LANES
// neighbouring threads.
template <bool KEEPS_NAN, int LANES>
__device__ static inline uint2 fine_row_maxima(const Bf16x8 v[4]) {
    uint32_t row[4], pair[2];
#pragma unroll
    for (int j = 0; j < 4; j++) row[j] = amax_update<KEEPS_NAN>(0, v[j]);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        pair[j] =
            __vmaxu2(__byte_perm(row[2 * j], row[2 * j + 1], 0x5410), __byte_perm(row[2 * j], row[2 * j + 1], 0x7632));
#pragma unroll
        for (int lane = LANES / 2; lane > 0; lane /= 2)
            pair[j] = __vmaxu2(pair[j], __shfl_xor_sync(0xffffffffu, pair[j], lane));
    }
    return make_uint2(pair[0], pair[1]);
}

// Raises `maxima` to the magnitudes of this thread's 8 columns over its 4 rows.
template <bool KEEPS_NAN>
__device__ static inline void fine_column_maxima(uint32_t maxima[4], const Bf16x8 v[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) maxima[k] = amax_larger<KEEPS_NAN>(maxima[k], v[j].word[k] & 0x7fff7fffu);
}

// Combines the column maxima of the two halves of a warp, which hold different rows of the same columns, and writes
// them to shared memory.
__device__ static inline void fine_put_column_maxima(uint32_t to[FINE_PAIRS], uint32_t maxima[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        maxima[k] = __vmaxu2(maxima[k], __shfl_xor_sync(0xffffffffu, maxima[k], CAST_COLUMN_THREADS));
    if (threadIdx.x % WARP_SIZE < CAST_COLUMN_THREADS)
        ((uint4 *)to)[threadIdx.x % CAST_COLUMN_THREADS] = make_uint4(maxima[0], maxima[1], maxima[2], maxima[3]);
}

// Returns the amax of a column as float bits, from `count` partial maxima.
__device__ static inline uint32_t fine_column_amax(const uint32_t (*maxima)[FINE_PAIRS], int count, int column) {
    uint32_t packed_amax = 0;
#pragma unroll
    for (int i = 0; i < count; i++) packed_amax = __vmaxu2(packed_amax, maxima[i][column / 2]);
    return column % 2 ? packed_amax & 0xffff0000u : packed_amax << 16;
}

// Computes the maxima of a tile's rows and columns, in each scale block.
template <bool KEEPS_NAN, int OUTPUTS, int BLOCKS>
__device__ static inline void fine_block_maxima(FineMaxima<OUTPUTS, BLOCKS> *maxima,
                                                const Bf16x8 v[OUTPUTS][CAST_GROUPS][4]) {
    enum { LANES = CAST_COLUMN_THREADS / BLOCKS };
    const int tx = threadIdx.x % CAST_COLUMN_THREADS, ty = threadIdx.x / CAST_COLUMN_THREADS,
              warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
        uint32_t columns[4] = {0, 0, 0, 0};
#pragma unroll
        for (int g = 0; g < CAST_GROUPS; g++) {
            const uint2 rows = fine_row_maxima<KEEPS_NAN, LANES>(v[o][g]);
            if (tx % LANES == 0) *(uint2 *)&maxima->rows[o][tx / LANES][g * CAST_GROUP_ROWS + 4 * ty] = rows;
            fine_column_maxima<KEEPS_NAN>(columns, v[o][g]);
            if (BLOCKS == 1 && g + 1 < CAST_GROUPS) continue;
            fine_put_column_maxima(maxima->columns[o][BLOCKS == 1 ? warp : g * FINE_WARPS + warp], columns);
#pragma unroll
            for (int k = 0; k < 4; k++) columns[k] = 0;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Scales. Threads 0..127 compute those of a tile's 128 rows, threads 128..255 those of its 128 columns. A tile with the
// granularity 128x128 has one scale, which all threads compute.

// Computes the scales of BLOCKS scale blocks in row i of an operand [outer, depth], from their amaxes; k is the tile's
// first index along the depth. Writes scale_inv to `inverse` unless that is NULL. In the layout of 1x32 scales, also
// writes zeros to the padding.
template <ScaleGranularity GRANULARITY, Fp8Format FORMAT, int BLOCKS>
__device__ static inline void fine_block_scales(float (*scales)[CAST_TILE], void *inverse, const uint32_t amax[BLOCKS],
                                                int64_t i, int64_t k, int64_t outer, int64_t depth) {
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const float scale = fp8_rule_scale(fine_rule(GRANULARITY), __uint_as_float(amax[b]), FORMAT);
        scales[b][threadIdx.x % CAST_TILE] = scale;
        if (GRANULARITY == BLOCK_1X32 && i < outer && k + 32 * b < depth)
            word |= (uint32_t)e8m0_from_amax(__uint_as_float(amax[b]), FORMAT) << (8 * b);
        if (GRANULARITY == BLOCK_1X128 && inverse && i < outer)
            ((float *)inverse)[scale_index(GRANULARITY, i, k, outer, depth)] = __frcp_rn(scale);
    }
    // The scales of 4 blocks of a row are adjacent, so one word holds them.
    if (GRANULARITY == BLOCK_1X32 && inverse)
        *(uint32_t *)((uint8_t *)inverse + scale_index(GRANULARITY, i, k, outer, depth)) = word;
}

// Computes scales from the maxima of the tile.
template <ScaleGranularity GRANULARITY, Fp8Format FORMAT, int OUTPUTS, int BLOCKS>
__device__ static inline void fine_scales_of_blocks(FineShared<OUTPUTS, BLOCKS> *s, const QTensor &out,
                                                    const FinePosition &at) {
    enum { PARTS = CAST_GROUPS * FINE_WARPS / (BLOCKS == 1 ? CAST_GROUPS : BLOCKS) };
    const int i = threadIdx.x % CAST_TILE;
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
        const int64_t column = o * at.C + at.column;
        uint32_t amax[BLOCKS];
        if (threadIdx.x < CAST_TILE) {
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) amax[b] = (uint32_t)s->maxima.rows[o][b][i] << 16;
            fine_block_scales<GRANULARITY, FORMAT, BLOCKS>(s->row_scales[o], out.rowwise ? out.rowwise_scale_inv : NULL,
                                                           amax, at.row + i, column, at.R, OUTPUTS * at.C);
        } else {
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) amax[b] = fine_column_amax(s->maxima.columns[o] + b * PARTS, PARTS, i);
            fine_block_scales<GRANULARITY, FORMAT, BLOCKS>(s->column_scales[o],
                                                           out.columnwise ? out.columnwise_scale_inv : NULL, amax,
                                                           column + i, at.row, OUTPUTS * at.C, at.R);
        }
    }
}

// Loads amaxes that an earlier pass found: of this thread's row, or of its column of each output. If `from` has no
// amaxes of rows or of columns, loads the tensor's amax in their place.
template <int OUTPUTS>
__device__ static inline void fine_load_amaxes(uint32_t amax[OUTPUTS], const QTensor &out, const FineAmaxes &from,
                                               const FinePosition &at) {
    const bool of_row = threadIdx.x < CAST_TILE;
    const int64_t row = min(at.row + threadIdx.x % CAST_TILE, at.R - 1),
                  column = min(at.column + threadIdx.x % CAST_TILE, at.C - 1);
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
        amax[o] = 0;
        if (of_row && out.rowwise && o == 0) amax[o] = from.rows ? from.rows[row] : *from.tensor;
        if (!of_row && out.columnwise) amax[o] = from.columns ? from.columns[o * at.C + column] : *from.tensor;
    }
}

// Computes scales from the amaxes of fine_load_amaxes. Tiles in the first column of tiles write scale_inv of their
// rows. Tiles in the first row of tiles write scale_inv of their columns.
template <Fp8Format FORMAT, int OUTPUTS>
__device__ static inline void fine_scales_of_rows(FineShared<OUTPUTS, 1> *s, const QTensor &out,
                                                  const uint32_t amax[OUTPUTS], const FinePosition &at) {
    const bool of_row = threadIdx.x < CAST_TILE;
    const int i = threadIdx.x % CAST_TILE;
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
        if (of_row && o > 0) break;
        const float scale = fp8_rule_scale(fine_rule(PER_ROW), __uint_as_float(amax[o]), FORMAT);
        (of_row ? s->row_scales : s->column_scales)[o][0][i] = scale;
        if (of_row && out.rowwise && at.column == 0 && at.row + i < at.R)
            ((float *)out.rowwise_scale_inv)[at.row + i] = __frcp_rn(scale);
        if (!of_row && out.columnwise && at.row == 0 && at.column + i < at.C)
            ((float *)out.columnwise_scale_inv)[o * at.C + at.column + i] = __frcp_rn(scale);
    }
}

// Writes scale_inv of the 128 x 128 block that begins at element (i, k) of an operand [outer, depth]. If it is the last
// block in a row of blocks, also writes zeros to the padding of the row of scales.
__device__ static inline void fine_put_square(void *inverse, float value, int64_t i, int64_t k, int64_t outer,
                                              int64_t depth) {
    float *to = (float *)inverse + scale_index(BLOCK_128X128, i, k, outer, depth);
    *to = value;
    for (int64_t b = k / CAST_TILE + 1; k + CAST_TILE >= depth && b % 4; b++) *++to = 0;
}

// Returns the one scale of the tile, and writes its scale_inv.
template <Fp8Format FORMAT, int BLOCKS>
__device__ static inline float fine_scale_of_square(FineShared<1, BLOCKS> *s, const Bf16x8 v[CAST_GROUPS][4],
                                                    const QTensor &out, const FinePosition &at) {
    uint32_t packed_amax = 0;
#pragma unroll
    for (int i = 0; i < 4 * CAST_GROUPS; i++)
        packed_amax = amax_update<fine_keeps_nan(BLOCK_128X128)>(packed_amax, v[i / 4][i % 4]);
    const uint32_t bits = warp_max_u32(amax_bits(packed_amax));
    if (threadIdx.x % WARP_SIZE == 0) s->warp_maxima[threadIdx.x / WARP_SIZE] = bits;
    __syncthreads();
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < FINE_WARPS; w++) amax = max(amax, s->warp_maxima[w]);
    const float scale = fp8_rule_scale(fine_rule(BLOCK_128X128), __uint_as_float(amax), FORMAT);
    if (threadIdx.x == 0 && out.rowwise)
        fine_put_square(out.rowwise_scale_inv, __frcp_rn(scale), at.row, at.column, at.R, at.C);
    if (threadIdx.x == 0 && out.columnwise)
        fine_put_square(out.columnwise_scale_inv, __frcp_rn(scale), at.column, at.row, at.C, at.R);
    return scale;
}

// ---- the cast

// Casts 8 values of a row to codes, each with its column's scale.
template <Fp8Format FORMAT>
__device__ static inline uint2 fp8x8_by_columns(Bf16x8 v, const float scale[8]) {
    float f[8];
    bf16x8_unpack(f, v);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = __fmul_rn(f[i], scale[i]);
    return make_uint2(fp8x4_from_floats<FORMAT>(f), fp8x4_from_floats<FORMAT>(f + 4));
}

// Writes a thread's codes of a group's 4 rows of output o: to the rowwise data if `out` has it, and to `tile` if `out`
// has columnwise data.
template <Fp8Format FORMAT, int OUTPUTS>
__device__ static inline void fine_put_group(uint32_t (*tile)[CAST_WORDS], const QTensor &out, const Bf16x8 v[4],
                                             const float row_scale[4], const float column_scale[8], int o, int group,
                                             const FinePosition &at) {
    const int64_t row = at.row + group * CAST_GROUP_ROWS + 4 * (threadIdx.x / CAST_COLUMN_THREADS),
                  column = at.column + 8 * (threadIdx.x % CAST_COLUMN_THREADS);
    if (out.rowwise && column < at.C) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (row + j < at.R)
                *(uint2 *)(out.rowwise + ((row + j) * OUTPUTS + o) * at.C + column) =
                    fp8x8_from_bf16<FORMAT>(v[j], row_scale[j]);
    }
    if (!out.columnwise) return;
    uint32_t low[4], high[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint2 codes = fp8x8_by_columns<FORMAT>(v[j], column_scale);
        low[j] = codes.x, high[j] = codes.y;
    }
    put_tile_words(tile, low, high, group);
}

// Casts all values of this thread, with scales from shared memory or with one `scale` for all.
template <ScaleGranularity GRANULARITY, Fp8Format FORMAT, int OUTPUTS, int BLOCKS>
__device__ static inline void fine_cast(FineShared<OUTPUTS, BLOCKS> *s, const QTensor &out,
                                        const Bf16x8 v[OUTPUTS][CAST_GROUPS][4], float scale, const FinePosition &at) {
    const int tx = threadIdx.x % CAST_COLUMN_THREADS, ty = threadIdx.x / CAST_COLUMN_THREADS;
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
        for (int g = 0; g < CAST_GROUPS; g++) {
            const int row = g * CAST_GROUP_ROWS + 4 * ty;
            float4 rows = make_float4(scale, scale, scale, scale), low = rows, high = rows;
            if (GRANULARITY != BLOCK_128X128) {
                const float4 *columns = (const float4 *)&s->column_scales[o][row * BLOCKS / CAST_TILE][8 * tx];
                rows =
                    *(const float4 *)&s->row_scales[GRANULARITY == PER_ROW ? 0 : o][8 * tx * BLOCKS / CAST_TILE][row];
                low = columns[0], high = columns[1];
            }
            const float row_scale[4] = {rows.x, rows.y, rows.z, rows.w},
                        column_scale[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            fine_put_group<FORMAT, OUTPUTS>(s->codes[o], out, v[o][g], row_scale, column_scale, o, g, at);
        }
}

// Processes tiles from the last to the first, like quantize_transpose_kernel.
template <class Source, ScaleGranularity GRANULARITY, Fp8Format FORMAT>
static __global__ void __launch_bounds__(CAST_THREADS, Source::MIN_BLOCKS < 3 ? Source::MIN_BLOCKS : 3)
    quantize_fine_kernel(const Source source, const QTensor out, const FineAmaxes amaxes, int64_t R, int64_t C) {
    grid_dependency_wait();
    enum { OUTPUTS = Source::OUTPUTS, BLOCKS = GRANULARITY == BLOCK_1X32 ? CAST_TILE / 32 : 1 };
    __shared__ __align__(16) FineShared<OUTPUTS, BLOCKS> shared;
    const unsigned column_tiles = (unsigned)ceil_div(C, CAST_TILE), index = gridDim.x - 1 - blockIdx.x;
    const FinePosition at = {(int64_t)(index / column_tiles) * CAST_TILE, (int64_t)(index % column_tiles) * CAST_TILE,
                             R, C};
    uint32_t amax[OUTPUTS];
    if constexpr (GRANULARITY == PER_ROW) fine_load_amaxes<OUTPUTS>(amax, out, amaxes, at);
    Bf16x8 v[OUTPUTS][CAST_GROUPS][4];
    fine_load(v, source, at);
    float scale = 0;
    if constexpr (GRANULARITY == PER_ROW) {
        fine_scales_of_rows<FORMAT, OUTPUTS>(&shared, out, amax, at);
        __syncthreads();
    } else if constexpr (GRANULARITY == BLOCK_128X128) {
        scale = fine_scale_of_square<FORMAT>(&shared, v[0], out, at);
    } else {
        fine_block_maxima<fine_keeps_nan(GRANULARITY)>(&shared.maxima, v);
        __syncthreads();
        fine_scales_of_blocks<GRANULARITY, FORMAT>(&shared, out, at);
        __syncthreads();
    }
    fine_cast<GRANULARITY, FORMAT>(&shared, out, v, scale, at);
    if (!out.columnwise) return;
    __syncthreads();
    store_tile_columns<OUTPUTS>(out.columnwise, shared.codes, at.row, at.column, R, C);
}

// ---- the amax pass

// Raises *to to `bits`, a maximum as float bits.
__device__ static inline void fine_raise(uint32_t *to, uint32_t bits) {
    if (bits) atomicMax(to, bits);
}

template <bool KEEPS_NAN, int OUTPUTS>
__device__ static inline void fine_raise_rows_and_columns(FineMaxima<OUTPUTS, 1> *maxima, const FineAmaxes &to,
                                                          const Bf16x8 v[OUTPUTS][CAST_GROUPS][4],
                                                          const FinePosition &at) {
    fine_block_maxima<KEEPS_NAN>(maxima, v);
    __syncthreads();
    const int i = threadIdx.x % CAST_TILE;
    uint32_t of_row = 0;
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
        of_row = max(of_row, (uint32_t)maxima->rows[o][0][i] << 16);
        if (threadIdx.x >= CAST_TILE && to.columns && at.column + i < at.C)
            fine_raise(to.columns + o * at.C + at.column + i, fine_column_amax(maxima->columns[o], FINE_WARPS, i));
    }
    if (threadIdx.x < CAST_TILE && to.rows && at.row + i < at.R) fine_raise(to.rows + at.row + i, of_row);
}

template <class Source, bool KEEPS_NAN>
static __global__ void __launch_bounds__(CAST_THREADS, Source::MIN_BLOCKS)
    quantize_amax_kernel(const Source source, const FineAmaxes to, int64_t R, int64_t C) {
    grid_dependency_wait();
    __shared__ __align__(16) FineMaxima<Source::OUTPUTS, 1> maxima;
    const unsigned column_tiles = (unsigned)ceil_div(C, CAST_TILE);
    const FinePosition at = {(int64_t)(blockIdx.x / column_tiles) * CAST_TILE,
                             (int64_t)(blockIdx.x % column_tiles) * CAST_TILE, R, C};
    Bf16x8 v[Source::OUTPUTS][CAST_GROUPS][4];
    fine_load(v, source, at);
    if (to.rows || to.columns) fine_raise_rows_and_columns<KEEPS_NAN>(&maxima, to, v, at);
    if (!to.tensor) return;
    uint32_t packed_amax = 0;
#pragma unroll
    for (int i = 0; i < 4 * CAST_GROUPS * Source::OUTPUTS; i++)
        packed_amax = amax_update<KEEPS_NAN>(packed_amax, v[i / (4 * CAST_GROUPS)][i / 4 % CAST_GROUPS][i % 4]);
    amax_publish(to.tensor, packed_amax);
}

#endif
