// The one table of options: names, defaults, ranges, help, and which options a resumed run must share.
#ifndef LLMC_OPTIONS_TABLE_H
#define LLMC_OPTIONS_TABLE_H

#include "recipes.h"

// The choices of an option: each list gives both the enum and the words of the command line. Recipes are in recipes.h.
#define PRECISIONS(X) X(PRECISION_FP32, "fp32") X(PRECISION_BF16, "bf16") X(PRECISION_FP8, "fp8")
#define WEIGHT_STORAGES(X)  \
    X(STORAGE_AUTO, "auto") \
    X(STORAGE_BF16, "bf16") \
    X(STORAGE_FP32, "fp32") \
    X(STORAGE_BF16_NEAREST, "bf16-nearest") X(STORAGE_FP16, "fp16") X(STORAGE_FP16_STOCHASTIC, "fp16-stochastic")
#define SUM_STORAGES(X) X(SUM_AUTO, "auto") X(SUM_BF16, "bf16") X(SUM_FP32, "fp32") X(SUM_FP8, "fp8")
#define MOMENTS(X)          \
    X(MOMENTS_AUTO, "auto") \
    X(MOMENTS_BF16, "bf16") \
    X(MOMENTS_FP32, "fp32") \
    X(MOMENTS_COAT, "coat") X(MOMENTS_COAT_STOCHASTIC, "coat-stochastic") X(MOMENTS_MSAMP, "msamp")
#define MSAMP_LEVELS(X) X(MSAMP_OFF, "off") X(MSAMP_O1, "O1") X(MSAMP_O2, "O2") X(MSAMP_O3, "O3")
#define RECOMPUTES(X)         \
    X(RECOMPUTE_NONE, "none") \
    X(RECOMPUTE_NORM, "norm") \
    X(RECOMPUTE_ATTENTION, "attention") X(RECOMPUTE_MLP, "mlp") X(RECOMPUTE_LAYER, "layer") X(RECOMPUTE_AUTO, "auto")
#define SCHEDULES(X) \
    X(SCHEDULE_CONSTANT, "constant") X(SCHEDULE_COSINE, "cosine") X(SCHEDULE_LINEAR, "linear") X(SCHEDULE_WSD, "wsd")
#define NONFINITES(X) X(NONFINITE_STOP, "stop") X(NONFINITE_SKIP, "skip")
#define OUTPUT_LOSSES(X) X(OUTPUT_LOST_CONTINUE, "continue") X(OUTPUT_LOST_STOP, "stop")
#define SAVE_ERRORS(X) X(SAVE_ERROR_RETRY, "retry") X(SAVE_ERROR_STOP, "stop")
#define SHARDINGS(X) \
    X(SHARDING_FULL, "full") X(SHARDING_GRAD_OP, "grad_op") X(SHARDING_NONE, "none") X(SHARDING_HYBRID, "hybrid")
#define REDUCES(X) X(REDUCE_BF16, "bf16") X(REDUCE_FP32, "fp32") X(REDUCE_FP8, "fp8")
#define GPUS(X) X(GPU_H200, "h200") X(GPU_H100, "h100")
#define SWITCHES(X) X(OFF, "off") X(ON, "on")
#define AUTO_SWITCHES(X) SWITCHES(X) X(AUTO, "auto")
#define FP8_FORMATS(X) X(FP8_FORMAT_AUTO, "auto") X(FP8_FORMAT_HYBRID, "hybrid") X(FP8_FORMAT_E4M3, "e4m3")
#define LM_HEADS(X) X(LM_HEAD_OFF, "off") X(LM_HEAD_FORWARD, "forward") X(LM_HEAD_ON, "on") X(LM_HEAD_ALL, "all")
#define FAST_ACCUMS(X) X(FAST_ACCUM_FPROP, "fprop") X(FAST_ACCUM_ALL, "all") X(FAST_ACCUM_NONE, "none")

#define LISTS(X) \
    X(LIST_NOTHING, "nothing") X(LIST_MODELS, "models") X(LIST_RECIPES, "recipes") X(LIST_OPTIONS, "options")
#define HELPS(X) X(HELP_OFF, "off") X(HELP_ON, "on") X(HELP_ALL, "all")

#define CHOICE_ID(id, word) id,
#define CHOICE_WORD(id, word) "|" word
#define CHOICE_WORD_ALONE(id, word) word,
enum { PRECISIONS(CHOICE_ID) };
enum { WEIGHT_STORAGES(CHOICE_ID) };
enum { SUM_STORAGES(CHOICE_ID) };
enum { MOMENTS(CHOICE_ID) };
enum { MSAMP_LEVELS(CHOICE_ID) };
enum { RECOMPUTES(CHOICE_ID) };
enum { SCHEDULES(CHOICE_ID) };
enum { NONFINITES(CHOICE_ID) };
enum { OUTPUT_LOSSES(CHOICE_ID) };
enum { SAVE_ERRORS(CHOICE_ID) };
enum { SHARDINGS(CHOICE_ID) };
enum { REDUCES(CHOICE_ID) };
enum { AUTO_SWITCHES(CHOICE_ID) };
enum { GPUS(CHOICE_ID) };
enum { FP8_FORMATS(CHOICE_ID) };
enum { LM_HEADS(CHOICE_ID) };
enum { FAST_ACCUMS(CHOICE_ID) };
enum { LISTS(CHOICE_ID) };
enum { HELPS(CHOICE_ID) };

#define OPTION_MAX 1e15
#define ACCUMULATION_MAX (1 << 20)
#define OPTION_TEXT_CAPACITY 4096  // bytes of a text, with its zero byte

// MUST_MATCH: a resumed run must have the value of the run that wrote the checkpoint. FREE: it need not. TOLD: it need
// not, but its steps differ then, so it says so. BRANCHES: MUST_MATCH with --resume, TOLD with --branch.
enum { FREE, MUST_MATCH, TOLD, BRANCHES };

// COMMON: most runs need the option, so --help prints it, with its help up to the first semicolon. RARE: only --help
// all prints it. --help all prints each help in full.
enum { RARE, COMMON };

// INT(field, name, default, smallest, largest, match, level, help)    whole number
// REAL(field, name, default, smallest, largest, match, level, help)   finite number
// TEXT(field, name, default, match, level, help)                      any text
// CHOICE(field, name, default, LIST, match, level, help)              one of a list of choices (above)
// FLAG(field, name, level, help)                                      given or not
// GROUP(title)                                                        heading in --help
// clang-format off
#define OPTIONS(GROUP, INT, REAL, TEXT, CHOICE, FLAG) \
    GROUP("data") \
    TEXT(train_data, "train-data", "data/tinystories_llama3_train*.bin", FREE, COMMON, \
         "training shards: a path or glob, or several with commas between") \
    TEXT(mix, "mix", "", TOLD, RARE, \
         "sources of training data and their weights, in place of --train-data: PATH=WEIGHT,PATH=WEIGHT and so on, " \
         "with paths or globs; every 1000 sequences hold each source's share, and each source is repeated by itself") \
    TEXT(val_data, "val-data", "", FREE, COMMON, "validation shards, as for --train-data") \
    CHOICE(shuffle, "shuffle", ON, SWITCHES, MUST_MATCH, RARE, \
         "order of training sequences; on: a new permutation in each epoch, from --seed; off: as in the files") \
    TEXT(document_mask, "document-mask", "off", MUST_MATCH, RARE, \
         "on: attention stays within a document, and its positions begin at 0, in training and validation; a " \
         "document begins with the separator token of the shards' tokenizer table or, without a table, with the " \
         "model's BOS token; a number: with the token of this id; mfu, sol and --profile count attention as with off") \
    INT(sequence_length, "sequence-length", 2048, 1, 1 << 20, MUST_MATCH, COMMON, "tokens per sequence (T)") \
    INT(batch_size, "batch-size", 1, 1, 65535, TOLD, COMMON, "sequences per rank and micro-step (B)") \
    INT(grad_accumulation_steps, "grad-accumulation-steps", 1, 1, ACCUMULATION_MAX, TOLD, COMMON, \
         "micro-steps per optimizer step") \
    INT(tokens_per_step, "tokens-per-step", 0, 0, OPTION_MAX, FREE, RARE, \
         "tokens of an optimizer step, over all ranks: sets --grad-accumulation-steps; 0: does not set it") \
    INT(num_steps, "num-steps", 100, 1, 1000000000, TOLD, COMMON, "optimizer steps of the whole run, with those before a --resume") \
    INT(seed, "seed", 42, 0, 4294967295.0, MUST_MATCH, COMMON, \
         "seed of initial weights, order of the data, generated text and, without --rounding-seed, stochastic " \
         "rounding") \
    INT(rounding_seed, "rounding-seed", -1, -1, 4294967295.0, BRANCHES, RARE, \
         "seed of stochastic rounding, but for --fp8-lm-head's, which follows from the logits alone; runs that " \
         "differ in it alone show how far rounding moves a loss; -1: the value of --seed") \
    GROUP("precision") \
    FLAG(fast, "fast", COMMON, \
         "short for --precision fp8 --fp8-recipe tensorwise_bounded --fp8-fast-accum all --fp8-lm-head all; options " \
         "after it on the command line may change them") \
    CHOICE(msamp, "msamp", MSAMP_OFF, MSAMP_LEVELS, FREE, RARE, \
         "a level of MS-AMP, short for several options; options after it on the command line may change them; O1: " \
         "--precision fp8 --master-weights fp16-stochastic --optimizer-state fp32 --grad-accum-dtype fp8 " \
         "--reduce-dtype fp8 (MS-AMP itself: --master-weights fp16); O2: O1 and --optimizer-state msamp; " \
         "O3: O2 and --sharding grad_op") \
    CHOICE(precision, "precision", PRECISION_BF16, PRECISIONS, BRANCHES, COMMON, \
         "dtype of GEMMs; fp8: by --fp8-recipe in the layers' linear layers, unless --fp8-filter or their sizes keep " \
         "them bf16, and bf16 in attention and, without --fp8-lm-head, in lm_head; fp32: CPU trainer only") \
    CHOICE(fp8_recipe, "fp8-recipe", RECIPE_TENSORWISE, RECIPES, BRANCHES, COMMON, \
         "which values share a scale; " RECIPES_HELP) \
    CHOICE(fp8_format, "fp8-format", FP8_FORMAT_AUTO, FP8_FORMATS, BRANCHES, RARE, \
         "FP8 format in which GEMMs read the gradients of outputs (dy); hybrid: E5M2; e4m3: E4M3, as for weights and " \
         "inputs; auto: the recipe's own") \
    TEXT(fp8_filter, "fp8-filter", "", BRANCHES, RARE, \
         "linear layers that stay bf16, separated by commas: first, last, layers=A or layers=A-B (from 0), attention, " \
         "mlp, qkv, attn_out, gate_up, down; lm_head has --fp8-lm-head; auto: at the start, time qkv, attn_out, " \
         "gate_up and down in FP8 and bf16, and keep the faster in all layers (GPU trainer; a resumed run keeps its " \
         "filter)") \
    CHOICE(fp8_lm_head, "fp8-lm-head", LM_HEAD_OFF, LM_HEADS, BRANCHES, RARE, \
         "GEMMs of lm_head in FP8, by any recipe but delayed; forward: the logits; on: also the gradient of " \
         "lm_head's input, for which the logits' gradient is rounded stochastically to FP8 (a recipe with one scale " \
         "for a tensor takes it from the largest value that this gradient can have; without scales of blocks it must " \
         "be e5m2); all: also the gradient of lm_head's weight, unless the recipe has weight gradients in bf16 " \
         "(rowwise is refused: its scales would depend on the rows of logits in memory at a time); off: none; " \
         "--fp8-audit leaves it out") \
    INT(fp8_amax_history, "fp8-amax-history", 1024, 1, 65536, BRANCHES, RARE, \
         "recipe delayed: length of a tensor's amax history; each tensor adds one amax per optimizer step (in " \
         "Transformer Engine, by default, one per micro-step), the largest of all micro-steps and ranks, except " \
         "amaxes that are 0 or NaN; until its first step has ended a tensor is cast by its current amax: an input " \
         "or gradient by that of the rank's micro-step, a weight by that over all ranks that share it") \
    INT(fp8_margin, "fp8-margin", 0, 0, 16, BRANCHES, RARE, "recipe delayed: scales are divided by 2 to this power") \
    CHOICE(fp8_fast_accum, "fp8-fast-accum", FAST_ACCUM_FPROP, FAST_ACCUMS, BRANCHES, RARE, \
         "FP8 GEMMs that use fast accumulation (Hopper), where cuBLASLt has it: fprop, all or none; lm_head's dgrad " \
         "and wgrad, recipes with scales of blocks, --fp8-emulate and the CPU trainer never use it") \
    FLAG(fp8_emulate, "fp8-emulate", RARE, \
         "quantize to FP8, then multiply in bf16: the recipe's rounding without its speed, also on GPUs without FP8") \
    INT(fp8_audit, "fp8-audit", 0, 0, 1000000000, FREE, RARE, \
         "steps between audits of every FP8 operand: amax, scale, share flushed to zero, share saturated, " \
         "SQNR; 0: none") \
    CHOICE(master_weights, "master-weights", STORAGE_AUTO, WEIGHT_STORAGES, MUST_MATCH, RARE, \
         "dtype of the weights that AdamW updates; bf16: rounded stochastically, so that small updates count on " \
         "average; bf16-nearest: rounded to nearest, which loses small updates; fp16: FP16 with a scale for each tensor, " \
         "rounded to nearest as in MS-AMP, which loses small updates below a learning rate of about 3e-5; " \
         "fp16-stochastic: as fp16, but rounded stochastically (the GPU trainer needs --optimizer-state msamp or fp32 " \
         "with both); with recipe tensorwise and all linear layers in FP8, FP8 weights are cast from these FP16 weights; auto: bf16, or fp32 with --precision fp32") \
    CHOICE(optimizer_state, "optimizer-state", MOMENTS_AUTO, MOMENTS, MUST_MATCH, COMMON, \
         "dtype of AdamW's two moments; bf16: rounded stochastically; coat: FP8 (E4M3) in groups of 128 whose range " \
         "is expanded, about half the bytes of bf16; coat-stochastic: as coat, but rounded stochastically, which " \
         "--beta2 0.999 needs; msamp: MS-AMP's E4M3 and FP16 with a scale for each tensor; " \
         "auto: bf16, or fp32 with --precision fp32") \
    CHOICE(grad_accum_dtype, "grad-accum-dtype", SUM_AUTO, SUM_STORAGES, TOLD, RARE, \
         "dtype in which gradients of micro-steps are added up; bf16: each sum is rounded stochastically, which " \
         "makes the gradient norm up to 0.00014% too large per micro-step; fp32: on the GPU 2 more bytes per " \
         "gradient kept, with several micro-steps, or with several ranks and --reduce-dtype fp32; fp8: " \
         "gradients of the layers' weight matrices in E4M3 with a scale for each tensor, as in MS-AMP, but sums are " \
         "rounded stochastically, which makes their norm up to 0.035% too large per micro-step (2.2% at 64, 8.6% at " \
         "256); on the GPU 1 byte less per gradient kept, also with one micro-step; auto: fp8 if --reduce-dtype is fp8; fp32 if " \
         "--grad-accumulation-steps is 256 or more, or if --master-weights, --reduce-dtype or --precision is fp32; " \
         "else bf16") \
    GROUP("memory") \
    CHOICE(recompute, "recompute", RECOMPUTE_NONE, RECOMPUTES, FREE, COMMON, \
         "what backward computes again, so that forward need not keep it; norm: the outputs of both norms; attention: " \
         "these, and q, k, v and attention's output; mlp: the norms' outputs, gate and up; layer: all but each layer's " \
         "input; the GPU trainer computes SwiGLU's output again in any case, also with none; auto: the first of none, " \
         "norm, attention, mlp, layer with which the run fits its memory") \
    CHOICE(fp8_activations, "fp8-activations", OFF, SWITCHES, TOLD, RARE, \
         "on: keep the outputs of gate and up for backward in FP8 (E4M3, a power-of-two scale for 128 values), which " \
         "on the GPU takes about half as many bytes; off: in bf16") \
    FLAG(optimizer_in_backward, "optimizer-in-backward", RARE, \
         "update each layer's weights in the backward pass, as soon as its gradient is complete: gradients of one or " \
         "two layers, of the embedding and of lm_head take memory, not those of the whole model; the weights stay " \
         "the same, except with --grad-clip; not with --on-nonfinite skip, several micro-steps or FP8 gradients " \
         "(--grad-accum-dtype or --reduce-dtype fp8)") \
    TEXT(offload, "offload", "none", FREE, RARE, \
         "what to keep in pinned host memory, separated by commas: moments (AdamW's), master (fp32 master weights), " \
         "activations (what all layers but the last three keep for backward), or none; moments and master are copied to " \
         "the GPU and back in each step (with --optimizer-in-backward: while backward computes); activations are copied " \
         "to the host while forward computes, and back while backward does; the numbers stay the same; GPU trainer only") \
    REAL(memory_limit, "memory-limit", 0, 0, 1e6, FREE, RARE, \
         "GiB of memory that each rank may use, on a GPU including CUDA's own memory: a run that needs more ends " \
         "before it starts, and says how it would need less; 0: all that the GPU has free (CPU trainer: the rank's " \
         "part of the machine's memory); a dry run with 0 has no limit") \
    GROUP("optimizer") \
    REAL(learning_rate, "learning-rate", -1, -1, 1e3, TOLD, COMMON, \
         "learning rate after warm-up; --lr-schedule may lower it from there; -1: chosen for pre-training, by the " \
         "model's size, or 1e-5 if the run starts from weights; then the run also chooses what is not given of " \
         "--lr-schedule (cosine), --min-lr-ratio (0.1), --warmup-steps (a twentieth of the steps, at most 2000), " \
         "--weight-decay (0.1), --beta2 (0.95) and --grad-clip (1); a run that goes on from a checkpoint takes the " \
         "checkpoint's") \
    CHOICE(lr_schedule, "lr-schedule", SCHEDULE_CONSTANT, SCHEDULES, TOLD, COMMON, \
         "how the learning rate goes on after warm-up; cosine and linear fall, and reach 0 one step after the last; " \
         "wsd is constant, then falls linearly in the last steps (--decay-steps), to 0 one step after the last") \
    INT(decay_steps, "decay-steps", 0, 0, 1000000000, TOLD, RARE, \
         "with --lr-schedule wsd: number of last steps in which the learning rate falls; 0: the last fifth of the " \
         "steps (rounded down; not before the end of warm-up); for a run without decay, to branch from, give " \
         "--lr-schedule constant") \
    REAL(min_lr_ratio, "min-lr-ratio", 0, 0, 1, TOLD, RARE, \
         "share of --learning-rate to which cosine, linear and wsd fall, in place of 0") \
    INT(warmup_steps, "warmup-steps", 0, 0, 1000000000, TOLD, COMMON, \
         "number of first steps in which the learning rate grows linearly: of N such steps, step k has k/N of " \
         "--learning-rate") \
    REAL(weight_decay, "weight-decay", 0.01, 0, 1e3, TOLD, RARE, "decoupled weight decay, of matrices only") \
    REAL(beta1, "beta1", 0.9, 0, 0.9999999, TOLD, RARE, "AdamW's decay of the first moment") \
    REAL(beta2, "beta2", 0.999, 0, 0.9999999, TOLD, RARE, "AdamW's decay of the second moment") \
    REAL(eps, "eps", 1e-8, 1e-30, 1, TOLD, RARE, "AdamW's epsilon, added to the square root of the second moment (after bias correction)") \
    REAL(grad_clip, "grad-clip", 0, 0, OPTION_MAX, TOLD, RARE, \
         "largest norm of the whole gradient: a gradient with a larger norm is scaled down to it (0: off); with " \
         "--optimizer-in-backward each layer's gradient is scaled before the norm of the whole is known, by an estimate " \
         "of it from the step's gradients so far and the last step's norms") \
    CHOICE(on_nonfinite, "on-nonfinite", NONFINITE_STOP, NONFINITES, TOLD, RARE, \
         "what to do when loss or gradient norm is not finite, or the norm above 2^63; stop: end the run and save nothing " \
         "of this step; skip: change no weight and no optimizer state in this step, which does not count in AdamW's " \
         "bias corrections (10 skipped steps in a row end the run)") \
    GROUP("ranks (mpirun -np N)") \
    CHOICE(sharding, "sharding", SHARDING_FULL, SHARDINGS, TOLD, COMMON, \
         "how weights, gradients and optimizer state are sharded over ranks, as PyTorch's FULL_SHARD, SHARD_GRAD_OP, " \
         "NO_SHARD (DDP) and HYBRID_SHARD; hybrid: full within --shard-size ranks, replicas across") \
    INT(shard_size, "shard-size", 0, 0, 1 << 20, TOLD, RARE, \
         "with --sharding hybrid: ranks that share one replica of the model; must divide the number of ranks; 0: the " \
         "ranks of one host") \
    CHOICE(reduce_dtype, "reduce-dtype", REDUCE_BF16, REDUCES, TOLD, RARE, \
         "dtype in which gradients are reduced over ranks; bf16: NCCL adds in bf16, copy engines and the CPU trainer " \
         "add more exactly; fp32: with several ranks and --grad-accum-dtype auto, gradients are also added up over " \
         "micro-steps and read by AdamW in fp32; fp8: gradients of the layers' weight matrices are sent in " \
         "E4M3, as in MS-AMP, but added in fp32 (needs --grad-accum-dtype auto or fp8); --precision fp32 always reduces in " \
         "fp32") \
    CHOICE(fp8_all_gather, "fp8-all-gather", AUTO, AUTO_SWITCHES, FREE, RARE, \
         "all-gather weights in FP8, in layers whose linear layers are all FP8; except with FP16 master weights, " \
         "the bits are those of an all-gather in bf16 and a cast after it; auto: on if the recipe has one scale per " \
         "tensor") \
    CHOICE(copy_engines, "copy-engines", AUTO, AUTO_SWITCHES, FREE, RARE, \
         "GPUs that share one replica of the model, on one host, read each other's weights and gradients with their " \
         "copy engines, which leaves SMs to GEMMs; off: NCCL moves them; auto: NCCL moves them if copy engines " \
         "cannot be used; on: a run on several GPUs ends if they cannot be used") \
    FLAG(share_gpu, "share-gpu", RARE, \
         "let several ranks use one GPU, to test on one GPU how several train: slow, because NCCL then takes each " \
         "rank for a host of its own") \
    TEXT(init_from, "init-from", "auto", FREE, RARE, \
         "how the ranks find each other; mpi: by mpirun or srun --mpi=pmix; slurm: srun without PMIx; file:PATH: rank 0 " \
         "writes its address to a file that all ranks can read; tcp:HOST:PORT: rank 0, on HOST, listens on PORT (with " \
         "file and tcp, the launcher's variables such as RANK and WORLD_SIZE number the ranks); auto: by what the " \
         "environment shows") \
    INT(init_timeout, "init-timeout", 300, 1, 86400, FREE, RARE, \
         "without MPI (--init-from slurm, file or tcp): seconds until all ranks must have found each other") \
    FLAG(check_links, "check-links", RARE, \
         "before the first step, measure the bandwidth of the collectives that the run uses (all-gather, " \
         "reduce-scatter, all-reduce), of pairs of ranks and of each GPU's copies, and the FLOP/s of its GEMMs; name " \
         "slow ranks and links") \
    INT(stall_timeout, "stall-timeout", 300, 5, 86400, FREE, RARE, \
         "with several ranks: the run ends, and names the stuck rank if it can, if for this many seconds all ranks " \
         "wait for each other, or a rank's call on a file does not return (4 times as many while loading, saving or " \
         "exporting); a rank that does not respond at all is stuck sooner: after a sixth of this time, or after 10 " \
         "seconds if that is longer (never later than --stall-timeout); a rank that computes, and waits for no NCCL " \
         "operation, is never stuck; if the MPI library allows calls from one thread alone (a warning says so), the " \
         "run ends once a rank has waited this long for others") \
    GROUP("plan (--dry-run)") \
    INT(world_size, "world-size", 0, 0, 1 << 20, FREE, RARE, \
         "with --dry-run: number of ranks to plan for, without mpirun; 0: the ranks that were started") \
    INT(ranks_per_host, "ranks-per-host", 8, 1, 1 << 20, FREE, RARE, \
         "with --dry-run and --world-size: ranks of one host, to tell traffic within hosts from traffic between " \
         "hosts") \
    REAL(network_gbps, "network-gbps", 0, 0, 1e9, FREE, RARE, \
         "with --dry-run: Gbit/s of each host's network, each way, to estimate a step's time; 0: not known, so there is " \
         "no estimate if ranks exchange data between hosts") \
    CHOICE(gpu, "gpu", GPU_H200, GPUS, FREE, RARE, "with --dry-run: the GPU for the estimate of a step's time") \
    REAL(step_ms, "step-ms", 0, 0, 1e9, FREE, RARE, \
         "with --dry-run: milliseconds that a step takes on one rank alone, as a run measured it; 0: estimated for " \
         "--gpu (the CPU trainer has no such estimate)") \
    GROUP("output") \
    INT(log_every, "log-every", 1, 1, 1000000000, FREE, RARE, \
         "steps between printed step lines; the first step of a run has one too, and the last one unless an error ends " \
         "the run; log.jsonl has the steps between") \
    INT(receipt, "receipt", 0, 0, 1000000000, FREE, RARE, \
         "steps between receipts in log.jsonl: hashes of each tensor's weights, moments, scales and gradients, " \
         "equal on any number of ranks, which scripts/verify.py checks by a replay; also at the start, before a " \
         "save and at the end; replicas that differ end the run; needs --deterministic; 0: none") \
    INT(replay_every, "replay-every", 0, 0, 1000000000, FREE, RARE, \
         "steps between replays, in which each rank computes the gradients of another rank's last micro-batch " \
         "again; if a bit differs, a third computation decides, and the run ends and names the rank, host and GPU " \
         "that computed wrongly; takes the time of a micro-step; needs --deterministic, 2 ranks or more, and " \
         "--sharding full or grad_op; 0: none") \
    INT(val_every, "val-every", 0, 0, 1000000000, FREE, COMMON, \
         "steps between validations, with --val-data (0: only the last step); the last step is always validated, unless " \
         "a signal ends the run") \
    INT(val_steps, "val-steps", 10, 1, 1000000000, FREE, RARE, \
         "number of validation sequences, spread evenly over --val-data (all if it has fewer), for any number of " \
         "ranks and any batch size; with a recipe whose current scale of x spans the batch (tensorwise, " \
         "tensorwise_bounded), a sequence's loss depends a little on the others in its batch") \
    INT(sample_every, "sample-every", 0, 0, 1000000000, FREE, RARE, \
         "steps between printed samples of text; the last step prints one too, unless a signal ends the run; 0: none") \
    INT(max_tokens, "max-tokens", 64, 1, 65536, FREE, RARE, \
         "largest number of tokens that the model writes for a sample or with --generate; a separator ends it " \
         "earlier") \
    TEXT(log_dir, "log-dir", "", FREE, COMMON, "folder for log.jsonl, which has every step") \
    CHOICE(on_output_lost, "on-output-lost", OUTPUT_LOST_CONTINUE, OUTPUT_LOSSES, FREE, RARE, \
         "what to do when stdout or stderr cannot be written any more (closed pipe, full disk); continue: train " \
         "on without it; stop: stop as for SIGINT, and save with --checkpoint-dir") \
    FLAG(profile, "profile", RARE, "print where the time of step --num-steps went, by operation (GPU trainer)") \
    REAL(peak_tflops, "peak-tflops", 0, 0, 1e9, FREE, RARE, \
         "the GPU's dense BF16 peak in TFLOP/s, for mfu and sol; 0: look it up by the GPU's name and compute " \
         "capability (CPU trainer: not known)") \
    GROUP("checkpoints") \
    TEXT(checkpoint_dir, "checkpoint-dir", "", FREE, COMMON, "folder for checkpoints") \
    TEXT(checkpoint_every, "checkpoint-every", "0", FREE, COMMON, \
         "steps between checkpoints, with --checkpoint-dir (0: only the last step); or the steps themselves, with " \
         "commas between (32,64,128; 32, with a comma behind it is one step): their checkpoints are never removed; " \
         "the last step is always saved, also if a signal ends the run early") \
    INT(keep_checkpoints, "keep-checkpoints", 2, 1, 1000000, FREE, RARE, "number of newest checkpoints to keep") \
    FLAG(resume, "resume", COMMON, \
         "continue from the newest checkpoint in --checkpoint-dir that is not damaged, renamed or of another format " \
         "version; start at step 1 if there is no checkpoint; end with an error if there are checkpoints, but none " \
         "to continue from") \
    TEXT(branch, "branch", "", FREE, RARE, \
         "a checkpoint (step-NNNNNNNN), or a folder of checkpoints, whose newest whole one is taken, of another " \
         "run with the same data: go on from it as --resume would, but --precision, the FP8 options and " \
         "--rounding-seed may differ too; its folder is only read; with --resume, and a checkpoint of its own in " \
         "--checkpoint-dir, a run goes on from that one") \
    CHOICE(on_save_error, "on-save-error", SAVE_ERROR_RETRY, SAVE_ERRORS, FREE, RARE, \
         "what to do when a checkpoint cannot be saved; retry: try again once, at once; if that fails too, train on to " \
         "the next save; stop: end the run; the run ends with an error in any case if its last save fails, or if a value " \
         "to be saved is not finite") \
    FLAG(no_verify, "no-verify", RARE, \
         "if MODEL is a checkpoint or export, do not compare its files with the hashes saved in it (--resume always " \
         "compares those of its checkpoint)") \
    TEXT(export_hf, "export-hf", "", FREE, COMMON, \
         "folder for the final weights in Hugging Face's format; nothing is exported if a signal ends the run early") \
    GROUP("use of a trained model, without training") \
    TEXT(generate, "generate", "", FREE, COMMON, \
         "a text: print it and what the model writes after it, then stop; MODEL is a folder with weights, or " \
         "--checkpoint-dir DIR --resume takes the newest checkpoint; the sequence length is that of the text and of " \
         "--max-tokens; the tokenizer table is that in the folder, else that beside the first shard of --train-data") \
    TEXT(evaluate, "evaluate", "", FREE, COMMON, \
         "shards, as for --train-data: print the model's loss on them with its interval, perplexity and bits per " \
         "byte, then stop; MODEL as for --generate; all sequences of --sequence-length count, or --val-steps of them") \
    GROUP("run") \
    FLAG(dry_run, "dry-run", COMMON, \
         "print settings, memory plan, GEMM table and an estimate of a step's time (or why there is none), then stop; " \
         "needs no GPU; with several ranks it also prints the traffic of a step (or why it is not counted)") \
    FLAG(json, "json", RARE, "with --dry-run: print one JSON object and nothing else, for programs") \
    CHOICE(list, "list", LIST_NOTHING, LISTS, FREE, RARE, \
         "print the names of all models, FP8 recipes or options, one per line, then stop") \
    FLAG(deterministic, "deterministic", RARE, \
         "give the same bits in every run with the same program, kind of GPU and options, also on another number of " \
         "ranks if --batch-size and the number of sequences in a step stay the same; not so with --sharding none or " \
         "hybrid and with FP8 gradients: there the number of ranks counts, as the run says at its start") \
    CHOICE(help, "help", HELP_OFF, HELPS, FREE, COMMON, \
         "print the options that most runs need, then stop; all: print all options and exit statuses; --help alone means " \
         "--help on")
// clang-format on

#define FIELD_OF_GROUP(title)
#define FIELD_OF_INT(field, ...) int64_t field;
#define FIELD_OF_REAL(field, ...) double field;
#define FIELD_OF_TEXT(field, ...) const char *field;
#define FIELD_OF_CHOICE(field, ...) int field;
#define FIELD_OF_FLAG(field, ...) bool field;

typedef struct {
    const char *model;
    OPTIONS(FIELD_OF_GROUP, FIELD_OF_INT, FIELD_OF_REAL, FIELD_OF_TEXT, FIELD_OF_CHOICE, FIELD_OF_FLAG)
    int argc;  // the command line; 0 if the options come from none
    char **argv;
} Options;

typedef enum { OPTION_GROUP, OPTION_INT, OPTION_REAL, OPTION_TEXT, OPTION_CHOICE, OPTION_FLAG } OptionKind;

typedef struct {
    OptionKind kind;
    const char *name;           // without the dashes; a group's title
    size_t field;               // offset in Options
    double initial, low, high;  // a number's default and range; initial of a choice: the index of its default
    const char *text;           // a text's default; a choice's "a|b|c"
    int match;                  // FREE, MUST_MATCH, TOLD or BRANCHES
    int level;                  // COMMON or RARE
    const char *help;
} OptionRow;

#define ROW_OF_GROUP(title) {OPTION_GROUP, title, 0, 0, 0, 0, "", FREE, RARE, ""},
#define ROW_OF_INT(field, name, initial, low, high, match, level, help)                                       \
    {OPTION_INT, name, offsetof(Options, field), (double)(initial), (double)(low), (double)(high), "", match, \
     level,      help},
#define ROW_OF_REAL(field, name, initial, low, high, match, level, help)                                       \
    {OPTION_REAL, name, offsetof(Options, field), (double)(initial), (double)(low), (double)(high), "", match, \
     level,       help},
#define ROW_OF_TEXT(field, name, initial, match, level, help) \
    {OPTION_TEXT, name, offsetof(Options, field), 0, 0, 0, initial, match, level, help},
#define ROW_OF_CHOICE(field, name, initial, choices, match, level, help)                                           \
    {OPTION_CHOICE, name, offsetof(Options, field), (double)(initial), 0, 0, &("" choices(CHOICE_WORD))[1], match, \
     level,         help},
#define ROW_OF_FLAG(field, name, level, help) \
    {OPTION_FLAG, name, offsetof(Options, field), 0, 0, 0, "", FREE, level, help},

// The table as rows; ends with a row whose name is NULL.
static inline const OptionRow *option_rows(void) {
    static const OptionRow rows[] = {
        OPTIONS(ROW_OF_GROUP, ROW_OF_INT, ROW_OF_REAL, ROW_OF_TEXT, ROW_OF_CHOICE, ROW_OF_FLAG) ROW_OF_GROUP(NULL)};
    return rows;
}

// A shorthand sets `option` to `value` from `level` of its own value on; a flag that is given has level 1.
typedef struct {
    const char *shorthand;
    int level;
    const char *option, *value;
} ShorthandRow;

// The rows of all shorthands; the last one has none. Of two rows that set one option the later one counts. In OPTIONS a
// shorthand stands before what it sets: the start prints options in that order, and it must be one that gives the run.
static inline const ShorthandRow *shorthand_rows(void) {
    static const ShorthandRow rows[] = {{"fast", 1, "precision", "fp8"},
                                        {"fast", 1, "fp8-recipe", "tensorwise_bounded"},
                                        {"fast", 1, "fp8-fast-accum", "all"},
                                        {"fast", 1, "fp8-lm-head", "all"},
                                        {"msamp", MSAMP_O1, "precision", "fp8"},
                                        {"msamp", MSAMP_O1, "master-weights", "fp16-stochastic"},
                                        {"msamp", MSAMP_O1, "optimizer-state", "fp32"},
                                        {"msamp", MSAMP_O1, "grad-accum-dtype", "fp8"},
                                        {"msamp", MSAMP_O1, "reduce-dtype", "fp8"},
                                        {"msamp", MSAMP_O2, "optimizer-state", "msamp"},
                                        {"msamp", MSAMP_O3, "sharding", "grad_op"},
                                        {NULL, 0, NULL, NULL}};
    return rows;
}

#endif
