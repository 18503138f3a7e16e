// The parts into which both trainers split the time of an optimizer step.
#ifndef LLMC_STEP_TIMES_H
#define LLMC_STEP_TIMES_H

typedef enum {
    TIME_COMPUTE,        // forward and backward pass; on the CPU also AdamW within it (--optimizer-in-backward)
    TIME_DATA,           // computation waits for the batch, which the host reads and sends
    TIME_COMMUNICATION,  // computation waits for weights, gradients, sums or amaxes of other ranks
    TIME_OPTIMIZER,      // gradient norm, AdamW, and casts of the new weights that follow it
    NUM_STEP_TIMES
} StepTime;

// Seconds of each part. On one rank, the sum of the parts is the time of the step.
typedef struct {
    double seconds[NUM_STEP_TIMES];
} StepTimes;

#endif
