"""Transformer Engine's FP8 recipes "delayed" and "blockwise" in numpy: scales, casts and the amax history.

This needs no GPU and no Transformer Engine. It follows version 2.x and uses the names of its settings.
"""

import numpy as np

from check_fp8_goldens import FORMATS, cast

FLOAT_MAX = np.float32(np.finfo(np.float32).max)


def largest_magnitude(x):
    """Returns the amax of a block. As fmaxf does, it ignores NaN; the element itself stays NaN."""
    return np.where(np.isnan(x), np.float32(0), np.abs(x)).max(initial=np.float32(0)).astype(np.float32)


def scale_of(amax, name, power_of_two, margin=0):
    """Returns the scale by which values are multiplied before the cast: one fp32 division.

    An amax of zero, infinity or NaN gives 1. A quotient above the largest float becomes the largest float. With
    power_of_two the scale is rounded down to a power of two.
    """
    amax = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        scale = np.float32(FORMATS[name][2] * 2.0**-margin) / amax
    scale = np.where(np.isinf(scale), FLOAT_MAX, scale)
    scale = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale).astype(np.float32)
    return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32) if power_of_two else scale


def blockwise(x, height, width, name):
    """Returns codes of the float32 matrix x, and scale_inv [ceil(rows / height), ceil(cols / width)] of its blocks.

    A block at a ragged edge is smaller.
    """
    rows, cols = x.shape
    codes = np.empty(x.shape, np.uint8)
    inverse = np.empty((-(-rows // height), -(-cols // width)), np.float32)
    for i in range(inverse.shape[0]):
        for k in range(inverse.shape[1]):
            block = np.s_[i * height : (i + 1) * height, k * width : (k + 1) * width]
            scale = scale_of(largest_magnitude(x[block]), name, True)
            codes[block] = cast(x[block] * scale, name)
            inverse[i, k] = np.float32(1) / scale
    return codes, inverse


def delayed_scales(amaxes, history_length, margin, name):
    """Returns the scale of one tensor after each update, from the amax of each pass; amax_compute_algo "max".

    Slot 0 of the history holds the amax of the current pass. After an amax of zero (the tensor was not cast, or is all
    zero) or NaN nothing changes. While an infinity is in the window, the scale stays.
    """
    history, scale, scales = np.zeros(history_length, np.float32), np.float32(1), []
    for amax in amaxes:
        if amax > 0:
            history[0] = amax
            largest = history.max()
            if np.isfinite(largest):
                scale = scale_of(largest, name, False, margin)
            history = np.roll(history, -1)
            history[0] = 0
        scales.append(scale)
    return np.array(scales, np.float32)
