// Order of llmc/fsdp.cuh's streams, without a GPU: the linker puts this file's functions in the place of the CUDA and NCCL calls (--wrap, see the
// Makefile). They keep a clock for each of the two streams, as events carry it from one to the other, and note which buffer each operation reads or
// writes. Two operations on one buffer, of which one writes, must be ordered by the clocks; and what is read must be what the schedule wants there.
#include "../../llmc/fsdp.cuh"

#include "check.h"

enum { COMPUTE, COMMUNICATION, STREAMS, MAX_BUFFERS = 4096, MAX_EVENTS = 1024 };

typedef struct {
    int64_t at[STREAMS];  // operations of each stream that have happened before
} Clock;

typedef struct {
    const void *address;
    int64_t content;         // what was last written: a unit's weights as step * 1000 + unit
    int writer;              // stream
    int64_t write;           // its number there; 0: never
    int64_t reads[STREAMS];  // number of the last read of each stream
} Buffer;

static Clock streams[STREAMS], events[MAX_EVENTS];
static Buffer buffers[MAX_BUFFERS];
static int num_buffers, num_events;
static int64_t races, wrong, gathers, current_step;

static int stream_index(cudaStream_t s) { return s == (cudaStream_t)1 ? COMPUTE : COMMUNICATION; }

static Buffer *buffer_at(const void *address) {
    for (int i = 0; i < num_buffers; i++)
        if (buffers[i].address == address) return &buffers[i];
    if (num_buffers == MAX_BUFFERS) die("more than %d buffers", MAX_BUFFERS);
    memset(&buffers[num_buffers], 0, sizeof(Buffer));
    buffers[num_buffers].address = address;
    return &buffers[num_buffers++];
}

static bool happened(const Clock *now, int stream, int64_t number) { return number <= now->at[stream]; }

static int64_t touch_read(cudaStream_t s, const void *address) {
    const int stream = stream_index(s);
    Clock *now = &streams[stream];
    Buffer *b = buffer_at(address);
    now->at[stream]++;
    races += !happened(now, b->writer, b->write);
    b->reads[stream] = now->at[stream];
    return b->content;
}

static void touch_write(cudaStream_t s, const void *address, int64_t content) {
    const int stream = stream_index(s);
    Clock *now = &streams[stream];
    Buffer *b = buffer_at(address);
    now->at[stream]++;
    races += !happened(now, b->writer, b->write);
    for (int other = 0; other < STREAMS; other++) races += !happened(now, other, b->reads[other]);
    b->writer = stream, b->write = now->at[stream], b->content = content;
}

// ---- in the place of CUDA and NCCL

extern "C" {
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    if (num_events == MAX_EVENTS) die("more than %d events", MAX_EVENTS);
    *e = (cudaEvent_t)(intptr_t)(++num_events);
    return cudaSuccess;
}
cudaError_t __wrap_cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    events[(intptr_t)e - 1] = streams[stream_index(s)];
    return cudaSuccess;
}
cudaError_t __wrap_cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    for (int i = 0; i < STREAMS; i++) streams[stream_index(s)].at[i] = max_i64(streams[stream_index(s)].at[i], events[(intptr_t)e - 1].at[i]);
    return cudaSuccess;
}
cudaError_t __wrap_cudaMemsetAsync(void *, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t __wrap_cudaGetLastError(void) { return cudaSuccess; }
// What nvcc makes of <<<>>>: the first gets a handle for a kernel's function, the second launches it.
cudaError_t __wrap___cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **arguments, size_t, cudaStream_t s) {
    const void *function = (const void *)kernel;
    if (function == (const void *)quantize_slices_kernel<FP8_E4M3>) {
        const Fp8Slices *slices = (const Fp8Slices *)arguments[0];
        touch_read(s, slices->x);
        for (int64_t l = 0; l < slices->count; l++) touch_write(s, slices->codes + l * slices->n, current_step * 1000 + l + 1);
    } else if (function == (const void *)fp8_transpose_kernel) {
        const int64_t content = touch_read(s, *(void **)arguments[1]);
        touch_write(s, *(void **)arguments[0], content);
    } else if (function == (const void *)fsdp_to_fp32_kernel) {
        touch_read(s, *(void **)arguments[1]);
        touch_write(s, *(void **)arguments[0], 0);
    } else if (function == (const void *)fsdp_add_kernel<float> || function == (const void *)fsdp_add_kernel<bf16>) {
        touch_read(s, *(void **)arguments[1]);
        touch_write(s, *(void **)arguments[0], 0);
    } else if (function == (const void *)quantize_amax_kernel<TensorSource, true> || function == (const void *)quantize_amax_kernel<TensorSource, false>) {
        touch_read(s, ((const TensorSource *)arguments[0])->x);
    } else {  // the casts: source, out
        const TensorSource *source = (const TensorSource *)arguments[0];
        const Fp8Tensor *out = (const Fp8Tensor *)arguments[1];
        const int64_t content = touch_read(s, source->x);
        if (out->row) touch_write(s, out->row, content);
        if (out->col) touch_write(s, out->col, content);
    }
    return cudaSuccess;
}
ncclResult_t __wrap_ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t __wrap_ncclGroupEnd(void) { return ncclSuccess; }
ncclResult_t __wrap_ncclCommGetAsyncError(ncclComm_t, ncclResult_t *state) {
    *state = ncclSuccess;
    return ncclSuccess;
}
ncclResult_t __wrap_ncclAllGather(const void *from, void *to, size_t, ncclDataType_t, ncclComm_t, cudaStream_t s) {
    const int64_t content = touch_read(s, from);
    touch_write(s, to, content);
    gathers++;
    return ncclSuccess;
}
ncclResult_t __wrap_ncclReduceScatter(const void *from, void *to, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t s) {
    touch_read(s, from);
    touch_write(s, to, 0);
    return ncclSuccess;
}
ncclResult_t __wrap_ncclAllReduce(const void *, void *to, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t s) {
    touch_read(s, to);
    touch_write(s, to, 0);
    return ncclSuccess;
}
}

// ---- the trainer's schedule

static void read_weights(Fsdp *f, int64_t unit, bool backward) {
    const FsdpUnit w = fsdp_weights(f, unit);
    const int64_t want = current_step * 1000 + unit;
    wrong += touch_read(f->stream, w.vectors) != want;
    bool reads_bf16 = unit == 0;
    for (int j = 0; unit && j < NUM_LINEARS; j++) {
        const bool fp8 = precision_of(f->precision, unit - 1, j) == f->precision->recipe && f->fp8;
        if (!fp8) reads_bf16 = true;
        if (!fp8 || f->precision->linear[j].offset) continue;  // what is gathered, and the rows and columns, are known by their first element
        const Fp8Tensor q = fsdp_weight_fp8(f, unit, j);
        if (!backward || f->rows_in_backward) wrong += touch_read(f->stream, q.row) != want;
        if (backward) wrong += touch_read(f->stream, q.col) != want;
    }
    if (reads_bf16) wrong += touch_read(f->stream, w.matrices) != want;
}

static void write_gradients(Fsdp *f, int64_t unit) {
    const FsdpUnit g = fsdp_gradients(f, unit);
    touch_write(f->stream, g.vectors, 0);
    touch_write(f->stream, g.matrices, 0);
}

static void forward(Fsdp *f) {
    const int64_t L = f->table->num_layers;
    fsdp_prefetch(f, 1);
    read_weights(f, 0, false);
    for (int64_t l = 0; l < L; l++) {
        fsdp_prefetch(f, l + 2);
        fsdp_acquire(f, 1 + l, false);
        read_weights(f, 1 + l, false);
        fsdp_release(f, 1 + l);
    }
    read_weights(f, 0, false);
}

static void micro_step(Fsdp *f, int64_t micro, bool last) {
    forward(f);
    fsdp_begin_gradients(f, 0);
    write_gradients(f, 0);
    for (int64_t l = f->table->num_layers - 1; l >= 0; l--) {
        fsdp_prefetch(f, l);
        fsdp_acquire(f, 1 + l, true);
        fsdp_begin_gradients(f, 1 + l);
        read_weights(f, 1 + l, true);
        write_gradients(f, 1 + l);
        fsdp_release(f, 1 + l);
        fsdp_reduce(f, 1 + l, micro, last);
    }
    write_gradients(f, 0);
    fsdp_reduce(f, 0, micro, last);
}

static void write_weights(Fsdp *f, int64_t unit) {
    for (int k = 0; k < NUM_SEGMENTS; k++) touch_write(f->stream, f->weights + shard_segment(f->table, &f->plan, unit, k).shard, current_step * 1000 + unit);
}

static void optimizer(Fsdp *f, double *squares, float *loss) {
    fsdp_compute_after(f);
    for (int64_t unit = 0; unit < unit_count(f->table); unit++)
        for (int k = 0; k < NUM_SEGMENTS; k++) touch_read(f->stream, f->grads + shard_segment(f->table, &f->plan, unit, k).shard);
    touch_write(f->stream, squares, 0);
    fsdp_reduce_statistics(f, loss, squares);
    touch_read(f->stream, squares);
    current_step++;
    write_weights(f, 0);
    fsdp_root_changed(f);
    touch_write(f->stream, f->amax, 0);
    for (int64_t unit = 1; unit < unit_count(f->table); unit++) write_weights(f, unit);
    fsdp_layers_changed(f);
}

typedef struct {
    int precision, recipe, sharding, gather, reduce, recompute, cache;
    const char *filter;
    int64_t world, shard_size, layers, accumulation;
} Case;

static void check_case(const Case *c) {
    ModelConfig m;
    model_config_preset(&m, "small");
    m.vocab_size = 320, m.num_layers = c->layers;
    ParameterTable table = parameter_table(&m);
    Options o = options_default();
    o.precision = c->precision, o.fp8_recipe = c->recipe, o.sharding = c->sharding, o.fp8_all_gather = c->gather, o.reduce_dtype = c->reduce, o.shard_size = c->shard_size;
    o.recompute = c->recompute, o.fp8_weight_cache = c->cache;
    Precision precision = precision_plan(&o, c->filter, &m, &table);
    static Nccl nccl;
    static Comm comm;
    memset(&nccl, 0, sizeof nccl);
    nccl.stream = (cudaStream_t)2;
    num_buffers = num_events = 0;
    races = wrong = gathers = current_step = 0;
    memset(streams, 0, sizeof streams);
    memset(events, 0, sizeof events);
    for (int i = 0; i < NCCL_PENDING; i++) fsdp_event(&nccl.operations[i].done);
    Fsdp f;
    fsdp_describe(&f, &table, &precision, &o, c->world, 1);
    comm.world = c->world, comm.group = f.plan.group, comm.replicas = f.replicas;
    nccl.host = &comm;
    for (int g = 0; g < COMM_NUM_GROUPS; g++) nccl.comms[g] = (ncclComm_t)16;
    Arena arena;
    memset(&arena, 0, sizeof arena);
    arena.base = (char *)(intptr_t)(1ll << 40);  // addresses that nothing reads
    arena_group(&arena, "shard");
    f.weights = (bf16 *)arena_take(&arena, f.plan.total * 2);
    f.grads = (bf16 *)arena_take(&arena, f.plan.total * 2);
    f.amax_stride = 1 << 16;
    f.amax = (uint32_t *)arena_take(&arena, c->layers * f.amax_stride * 4);
    f.inverse_scale = (float *)arena_take(&arena, 4096);
    double *squares = (double *)arena_take(&arena, 8);
    float *loss = (float *)arena_take(&arena, 4);
    f.scale_stride = 12;
    fsdp_place(&f, &arena);
    f.nccl = &nccl, f.stream = (cudaStream_t)1;
    fsdp_create(&f);
    optimizer(&f, squares, loss);
    for (int step = 0; step < 3; step++) {
        for (int64_t micro = 0; micro < c->accumulation; micro++) micro_step(&f, micro, micro + 1 == c->accumulation);
        optimizer(&f, squares, loss);
        if (step == 1) forward(&f);
    }
    CHECK(races == 0 && wrong == 0, "precision %d, recipe %d, filter \"%s\", sharding %d, gather %d, reduce %d, recompute %d, %lld ranks, %lld layers, accumulation %lld: %lld races, %lld wrong weights",
          c->precision, c->recipe, c->filter, c->sharding, c->gather, c->reduce, c->recompute, (long long)c->world, (long long)c->layers, (long long)c->accumulation, (long long)races, (long long)wrong);
    if (c->sharding == SHARDING_FULL && c->gather == ON) CHECK(gathers > 0, "nothing was gathered");
    fsdp_destroy(&f);
    precision_free(&precision);
    parameter_table_free(&table);
}

// Every way to split, of one precision. `most`: of gather, on or off.
static void check_all(int precision, int recipe, const char *filter, int gather_most, int recompute, int cache) {
    const int64_t layers[] = {1, 2, 3, 6};
    for (int sharding = SHARDING_FULL; sharding <= SHARDING_HYBRID; sharding++)
        for (int gather = OFF; gather <= gather_most; gather++)
            for (int reduce = REDUCE_BF16; reduce <= REDUCE_FP32; reduce++)
                for (int i = 0; i < 4; i++)
                    for (int64_t accumulation = 1; accumulation < 4; accumulation++) {
                        const Case c = {precision, recipe, sharding, gather, reduce, recompute, cache, filter, 4, sharding == SHARDING_HYBRID ? 2 : 0, layers[i], accumulation};
                        check_case(&c);
                    }
}

int main(void) {
    check_all(PRECISION_BF16, RECIPE_TENSORWISE, "", OFF, RECOMPUTE_NONE, ON);
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_LAYER; recompute++) {
        check_all(PRECISION_FP8, RECIPE_TENSORWISE, "", ON, recompute, ON);
        check_all(PRECISION_FP8, RECIPE_TENSORWISE, "first,last", ON, recompute, ON);
        check_all(PRECISION_FP8, RECIPE_TENSORWISE, "mlp", ON, recompute, ON);
        check_all(PRECISION_FP8, RECIPE_TENSORWISE, "first", ON, recompute, OFF);
        check_all(PRECISION_FP8, RECIPE_ROWWISE, "", OFF, recompute, OFF);
        check_all(PRECISION_FP8, RECIPE_ROWWISE, "", OFF, recompute, ON);
        check_all(PRECISION_FP8, RECIPE_BLOCKWISE, "last", OFF, recompute, ON);
    }
    return check_report();
}
