// After the CPU's backward pass: gradient norm, clipping, AdamW, and the new weights rounded and cast.
#ifndef LLMC_CPU_OPTIMIZER_H
#define LLMC_CPU_OPTIMIZER_H

#include "../reference/initialize.h"
#include "quantize.h"

// Returns this rank's part of the weight of linear layer `id` in layer l.
static inline ShardRange linear_range(const Trainer *t, int64_t l, int id) {
    const LinearShape *s = &t->precision.linear[id];
    return shard_matrix(&t->table, &t->plan, l, s->offset, s->N * s->K);
}

// Returns where this rank keeps the FP8 codes of its part `r` of a weight.
static inline uint8_t *linear_codes(const Trainer *t, int64_t l, ShardRange r) {
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
    return t->units.codes + l * g.slice + r.shard - g.shard;
}

// Casts this rank's part `r` of a linear layer's weight to FP8 with one scale. If the weight is cast from FP16 masters,
// each of its tensors, such as q, k and v, is decoded with a scale of its own.
static inline void weight_cast(Trainer *t, int64_t l, int id, ShardRange r) {
    const float scale = weight_scale(t, l, id);
    uint8_t *codes = linear_codes(t, l, r);
    if (!t->precision.casts_masters) {
        for (int64_t e = 0; e < r.count; e++)
            codes[e] = fp8_from_float(t->params.weights[r.shard + e] * scale, FP8_E4M3);
        return;
    }
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        if (p->layer != l || parameter_segment(p) != SEGMENT_MATRICES) continue;
        const ShardRange part = shard_parameter(&t->table, &t->plan, p);
        if (part.count && part.shard >= r.shard && part.shard < r.shard + r.count)
            fp16_weights_cast(codes + part.shard - r.shard, t->params.fp16_master + part.shard,
                              *tensor_scale(t, STATE_MASTER_SCALE, i), scale, part.count);
    }
}

// Finds the amaxes of whole weights, by one reduction over the shard group. Casts this rank's slices of layers that are
// cast ahead.
static inline void weights_quantize(Trainer *t) {
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        const ShardRange r = linear_range(t, l, id);
        t->scales.amax[tensor_index(l, TENSOR_W, id)] =
            quantize_tensor_amax(t->params.weights + r.shard, r.count, t->precision.recipe->rule);
    }
    // also reduces the amaxes of inputs and gradients, which are zero between micro-steps
    comm_max_u32(t->comm, COMM_SHARD, t->scales.amax, tensor_count(t->d.L));
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        if (cast_ahead(t, l)) weight_cast(t, l, id, linear_range(t, l, id));
    }
}

// Fills params.master with the values of the FP16 masters, for entries [begin, end) of the parameter table.
static inline void masters_decode(Trainer *t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        const ShardRange r = shard_parameter(&t->table, &t->plan, &t->table.entries[i]);
        fp16_weights_decode(t->params.master + r.shard, t->params.fp16_master + r.shard,
                            *tensor_scale(t, STATE_MASTER_SCALE, i), r.count);
    }
}

// Finds the amaxes of whole tensors, entries [begin, end) of the parameter table, by one reduction over the shard
// group. This rank's amaxes of MS-AMP's moments, if it has these, are in params.amaxes already. This function computes
// those of FP16 masters from params.master.
static inline void reduce_tensor_amaxes(Trainer *t, int64_t begin, int64_t end) {
    for (int64_t i = begin; t->params.fp16_master && i < end; i++) {
        const ShardRange r = shard_parameter(&t->table, &t->plan, &t->table.entries[i]);
        *tensor_amax(t, STATE_MASTER_SCALE, i) =
            quantize_tensor_amax(t->params.master + r.shard, r.count, SCALE_TORCHAO);
    }
    comm_max_u32(t->comm, COMM_SHARD, t->params.amaxes + begin * TENSOR_SCALES, TENSOR_SCALES * (end - begin));
}

// Stores params.master, whose amaxes are known, as the FP16 masters, for entries [begin, end) of the parameter table.
// A scale of 0 is set from the amax alone. rounding: of the step that computed them. NULL: they are initial or loaded;
// all other scales, which a checkpoint brought, stay as they are.
static inline void masters_encode(Trainer *t, int64_t begin, int64_t end, const AdamwStep *rounding) {
    for (int64_t i = begin; i < end; i++) {
        const Parameter *p = &t->table.entries[i];
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        const float amax = float_from_bits(*tensor_amax(t, STATE_MASTER_SCALE, i));
        float *scale = tensor_scale(t, STATE_MASTER_SCALE, i);
        if (*scale == 0) *scale = msamp_scale(amax, 1, FP16_MAX);
        else if (rounding) *scale = msamp_scale(amax, *scale, FP16_MAX);
        fp16_weights_round(t->params.fp16_master + r.shard, t->params.master + r.shard, *scale, p->offset + r.first,
                           r.count, rounding);
    }
}

// Recipe tensorwise_bounded, after AdamW's update: makes the scales of the new weights from the amaxes of the old ones,
// which scales.amax still has, and from the largest step of AdamW.
static inline void bounded_update(Trainer *t, int64_t step) {
    const WeightBound b = adamw_bound_of(t->o, step, t->skipped);
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t w = tensor_index(i / NUM_LINEARS, TENSOR_W, (int)(i % NUM_LINEARS));
        t->scales.delayed.scale[w] = weight_bound_scale(float_from_bits(t->scales.amax[w]), b);
    }
}

// Called when the master weights have changed: makes the weights from them, invalidates all gathered weights, and, for
// recipes with one scale per tensor, finds the amaxes of weights and casts those that are cast ahead.
static inline void weights_refresh(Trainer *t) {
    const bool copy = t->params.weights != t->params.master;
    if (t->params.fp16_master) masters_decode(t, 0, t->table.count);
    if (copy) memcpy(t->params.weights, t->params.master, (size_t)t->plan.total * sizeof(float));
    for (int64_t l = ROOT; (copy || t->params.fp16_master) && l < t->d.L; l++)
        for (int k = 0; k < NUM_SEGMENTS; k++) {
            const ShardSegment g = segment_slice(&t->table, &t->plan, l, k);
            if (l == ROOT || k != SEGMENT_MATRICES || !t->precision.casts_masters)
                round_array(t->params.weights + g.shard, g.slice, t->rounding);
        }
    t->units.root_held = false;
    for (int64_t i = 0; i < t->units.num_slots; i++) t->units.slots[i].layer = -1;
    if (recipe_has_tensor_scales(t->precision.recipe)) weights_quantize(t);
}

// Sets params.master to the initial weights. weights_changed must follow.
static inline void weights_initialize(Trainer *t) {
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        float *w = t->params.master + r.shard;
        for (int64_t e = 0; e < r.count; e++)
            w[e] =
                parameter_initial_value(p->flags, (float)t->m.initializer_range, (uint64_t)t->o->seed, i, r.first + e);
        if (options_bf16_weights(t->o)) round_array(w, r.count, ROUND_BF16);
    }
}

// Delayed scaling: moves amaxes to the histories and makes the next scales. `weights`: the amaxes of the weights that
// the step used; else those of a micro-step's inputs and gradients.
static inline void histories_update(Trainer *t, bool weights) {
    const DelayedState *d = &t->scales.delayed;
    for (int64_t l = 0; l < t->d.L; l++)
        for (int role = 0; role < NUM_TENSORS; role++)
            for (int id = 0; id < NUM_LINEARS; id++) {
                if ((role == TENSOR_W) != weights || !precision_of(&t->precision, l, id)->delayed) continue;
                const int64_t i = tensor_index(l, (TensorRole)role, id);
                const Fp8Format format = precision_format(&t->precision, (TensorRole)role);
                delayed_update(d->history + i * d->window, d->window, &d->scale[i], t->scales.amax[i], format,
                               (int)t->o->fp8_margin);
                t->scales.amax[i] = 0;
            }
}

// Saves histories and scales (keep), or restores them. Does nothing without delayed scaling or --on-nonfinite skip.
static inline void copy_delayed_before(Trainer *t, bool keep) {
    float *kept = t->scales.delayed_before, *current = t->scales.delayed.history;
    if (kept) memcpy(keep ? kept : current, keep ? current : kept, (size_t)delayed_elements(t) * sizeof(float));
}

static inline CoatMoment coat_from(CoatMoment m, int64_t element) {
    return (CoatMoment){m.codes + element, m.groups + element / COAT_GROUP};
}

static inline MsampArrays msamp_from(MsampArrays m, int64_t element) {
    return (MsampArrays){m.exp_avg + element, m.exp_avg_sq + element};
}

static inline MsampPair moment_scales(const Trainer *t, int64_t i) {
    return (MsampPair){*tensor_scale(t, STATE_EXP_AVG_SCALE, i), *tensor_scale(t, STATE_EXP_AVG_SQ_SCALE, i)};
}

// The first pass of MS-AMP's AdamW, on entry i of the parameter table: updates its weights, and finds the amaxes of its
// new moments.
static inline void msamp_update(Trainer *t, int64_t i, float factor, const MsampStep *s, const AdamwStep *rounding) {
    const Params *all = &t->params;
    const Parameter *p = &t->table.entries[i];
    const ShardRange r = shard_parameter(&t->table, &t->plan, p);
    const MsampPair amax = adamw_msamp_weights(
        all->master + r.shard, msamp_from(all->msamp, r.shard), moment_scales(t, i), gradients_at(t, p->layer, r.shard),
        p->offset + r.first, r.count, p->flags & PARAM_DECAY, factor, options_bf16_weights(t->o), s, rounding);
    *tensor_amax(t, STATE_EXP_AVG_SCALE, i) = float_bits(amax.exp_avg);
    *tensor_amax(t, STATE_EXP_AVG_SQ_SCALE, i) = float_bits(amax.exp_avg_sq);
}

// The second pass: stores the moments of entry i with their new scales.
static inline void msamp_store(Trainer *t, int64_t i, float factor, const MsampStep *s) {
    const Parameter *p = &t->table.entries[i];
    const ShardRange r = shard_parameter(&t->table, &t->plan, p);
    const float amax = float_from_bits(*tensor_amax(t, STATE_EXP_AVG_SCALE, i)),
                amax_sq = float_from_bits(*tensor_amax(t, STATE_EXP_AVG_SQ_SCALE, i));
    const MsampPair scale = {msamp_scale(amax, 1, FP8_E4M3_MAX), msamp_scale(amax_sq, 1, FP16_MAX)};
    adamw_msamp_moments(msamp_from(t->params.msamp, r.shard), moment_scales(t, i), scale,
                        gradients_at(t, p->layer, r.shard), r.count, factor, s);
    *tensor_scale(t, STATE_EXP_AVG_SCALE, i) = scale.exp_avg;
    *tensor_scale(t, STATE_EXP_AVG_SQ_SCALE, i) = scale.exp_avg_sq;
}

// Updates entry i of the parameter table. With COAT's moments, the entries that are joined to entry i (PARAM_JOINED)
// share groups with it, and are updated together with it. If entry i itself is joined to an earlier one, does nothing.
static inline void parameter_update(Trainer *t, int64_t i, float factor, const AdamwStep *s) {
    const Options *o = t->o;
    const Params *all = &t->params;
    const Parameter *p = &t->table.entries[i];
    const bool decay = p->flags & PARAM_DECAY, bf16_weights = options_bf16_weights(o);
    if (!options_coat(o)) {
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        adamw_reference(all->master + r.shard, all->exp_avg + r.shard, all->exp_avg_sq + r.shard,
                        gradients_at(t, p->layer, r.shard), p->offset + r.first, r.count, decay, factor, bf16_weights,
                        o->optimizer_state == MOMENTS_BF16, s);
    } else if (!(p->flags & PARAM_JOINED)) {
        const ShardRange r = segment_range(&t->table, &t->plan, p->layer, parameter_segment(p), p->offset,
                                           parameter_fused_elements(&t->table, i));
        adamw_coat_reference(all->master + r.shard, coat_from(all->coat_avg, r.shard),
                             coat_from(all->coat_avg_sq, r.shard), gradients_at(t, p->layer, r.shard),
                             p->offset + r.first, r.count, decay, factor, bf16_weights,
                             o->optimizer_state == MOMENTS_COAT_STOCHASTIC, s);
    }
}

// Runs AdamW on entries [begin, end) of the parameter table, which are whole units, in optimizer step `step`, counted
// from 0. factor: scales the gradients.
static inline void parameters_update(Trainer *t, int64_t begin, int64_t end, int64_t step, float factor) {
    const AdamwStep s = adamw_step_of(t->o, step, t->skipped);
    const MsampStep msamp_s = msamp_step_of(t->o, step, t->skipped);
    const bool msamp = t->o->optimizer_state == MOMENTS_MSAMP;
    if (t->params.fp16_master) masters_decode(t, begin, end);
    for (int64_t i = begin; i < end; i++) {
        if (msamp) msamp_update(t, i, factor, &msamp_s, &s);
        else parameter_update(t, i, factor, &s);
    }
    if (options_tensor_scales(t->o)) reduce_tensor_amaxes(t, begin, end);
    for (int64_t i = begin; msamp && i < end; i++) msamp_store(t, i, factor, &msamp_s);
    if (t->params.fp16_master) masters_encode(t, begin, end, &s);
}

// Ends optimizer step `step`, counted from 0. With delayed scaling adds the amaxes of the old weights, which
// scales.amax still has, to their histories. With tensorwise_bounded makes the scales of the new weights. Then makes
// all later work read the new weights.
static inline void finish_update(Trainer *t, int64_t step) {
    if (t->precision.recipe->delayed) histories_update(t, true);
    if (t->precision.recipe->bounded) bounded_update(t, step);
    weights_refresh(t);
}

// Takes optimizer step `step`, counted from 0, with params.gradients, whose norm is given.
static inline void weights_update(Trainer *t, int64_t step, double norm) {
    parameters_update(t, 0, t->table.count, step, clip_factor(norm, t->o->grad_clip));
    finish_update(t, step);
}

// Updates *s with n more gradients, the first of which is element `shard` of the flat shard arrays. Raises s->magnitude
// to their largest magnitude. Sets s->position to the first gradient, in backward order, that is large compared with
// that (adamw_large). Gradients of earlier calls count only if the largest of them is still large.
static inline void find_large(const Trainer *t, const float *gradients, int64_t shard, int64_t n, NonfiniteStep *s) {
    const BackwardOrder order = shard_backward_order(&t->table, &t->plan);
    const uint32_t before = s->magnitude;
    for (int64_t i = 0; i < n; i++)
        if (adamw_magnitude(gradients[i]) > s->magnitude) s->magnitude = adamw_magnitude(gradients[i]);
    if (before < adamw_large(s->magnitude)) s->position = NONFINITE_NONE;
    for (int64_t i = 0; i < n; i++)
        if (adamw_magnitude(gradients[i]) >= adamw_large(s->magnitude))
            s->position = min_i64(s->position, backward_position(order, shard + i));
}

// Returns the factor that clips the gradient of unit l, and records the norm so far; without --grad-clip returns 1.
// early.squares already includes unit l.
static inline float clip_in_backward(Trainer *t, int64_t l) {
    float *norms = t->early.norms;
    if (!norms) return 1;
    const float norm = (float)sqrt(t->early.squares);
    const float factor = clip_factor(clip_norm_so_far(norm, norms[1 + l], norms[1 + ROOT]), t->o->grad_clip);
    norms[1 + l] = norm;
    return factor;
}

// --optimizer-in-backward: sums the gradient of unit l, a layer or ROOT, over the replicas, and updates the unit. A
// unit whose gradient norm is not accepted keeps its weights, and the run ends after this step. This function also
// locates gradients that could make the norm of the whole model too large.
static inline void update_in_backward(Trainer *t, int64_t l) {
    const int64_t n = shard_elements(&t->plan, l), units = t->d.L + 1;
    float *gradients = t->params.gradients + gradients_begin(t, l);
    reduce_replicas(t, l);
    const double squares = unit_squares(t, l), norm = sqrt(squares);
    t->early.squares += squares;
    if (!adamw_accepts(norm * sqrt((double)units)))
        find_large(t, gradients, shard_begin(&t->plan, l), n, &t->early.large);
    const float factor = clip_in_backward(t, l);
    if (!adamw_accepts(norm)) return;
    const UnitEntries u = unit_entries(t, l);
    parameters_update(t, u.begin, u.end, t->early.step, factor);
}

// Returns what this rank knows of a step that was not taken.
static inline NonfiniteStep nonfinite_step(const Trainer *t, double loss, double norm) {
    NonfiniteStep s = {loss, norm, t->bad_norm, 0, NONFINITE_NONE, 1};
    if (t->o->optimizer_in_backward) s.magnitude = t->early.large.magnitude, s.position = t->early.large.position;
    else find_large(t, t->params.gradients, 0, t->plan.total, &s);
    return s;
}

#endif
