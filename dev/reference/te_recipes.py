"""Transformer Engine's FP8 recipes "delayed" and "blockwise" written out in numpy: scales, casts and the amax history. No GPU and no Transformer Engine
is needed; what is written here is its behaviour as of version 2.x, with the names of its settings."""

import numpy as np

from check_fp8_goldens import FORMATS, cast

FLOAT_MAX = np.float32(np.finfo(np.float32).max)


def largest_magnitude(x):
    """amax of a block. Its maxima are taken with fmaxf, which drops NaN: an element that is NaN stays NaN but does not count."""
    return np.where(np.isnan(x), np.float32(0), np.abs(x)).max(initial=np.float32(0)).astype(np.float32)


def scale_of(amax, name, power_of_two, margin=0):
    """The multiplier that takes values to FP8: one fp32 division. An amax of zero, infinity or NaN gives 1, a quotient
    past the largest float that float.
    power_of_two: the mantissa is cleared, so it is rounded down."""
    amax = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        scale = np.float32(FORMATS[name][2] * 2.0**-margin) / amax
    scale = np.where(np.isinf(scale), FLOAT_MAX, scale)
    scale = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale).astype(np.float32)
    return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32) if power_of_two else scale


def blockwise(x, height, width, name):
    """Codes of the float32 matrix x and the inverse scales [ceil(rows / height), ceil(cols / width)] of its blocks; a block at a ragged edge is smaller."""
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
    """The scale after each update of one tensor, from the amaxes of the passes between; amax_compute_algo "max". Slot 0 of the history holds the amax of the
    pass under way. An amax of zero says that the tensor was not cast: nothing moves. While an infinity is in the window
    the scale stays.
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
