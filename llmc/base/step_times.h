// Parts of the time of an optimizer step, in which both trainers report it.
#ifndef LLMC_STEP_TIMES_H
#define LLMC_STEP_TIMES_H

typedef enum {
    TIME_COMPUTE,        // forward and backward pass
    TIME_DATA,           // no work: the host still reads the batch, and sends it
    TIME_COMMUNICATION,  // no work: waits for other ranks' weights, gradients or sums
    TIME_OPTIMIZER,      // gradient norm and AdamW
    NUM_STEP_TIMES
} StepTime;

// Seconds of each part. Their sum is the time of the step.
typedef struct {
    double seconds[NUM_STEP_TIMES];
} StepTimes;

// Returns a part's name in log.jsonl and in the summary.
static inline const char *step_time_name(StepTime part) {
    static const char *const names[NUM_STEP_TIMES] = {"compute", "data", "communication", "optimizer"};
    return names[part];
}

#endif
