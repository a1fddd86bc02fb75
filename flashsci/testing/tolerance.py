"""The constants that define the judge's tolerances (bounds.py), in one place.

A rounding is one relative error of the unit roundoff: of the results' dtype, or of the precision that kernels keep
scores, statistics and sums in (fp32), which is called internal.
"""

# An error may be this many times that of plain PyTorch in the same dtype.
BASELINE_FACTOR = 2.0
# The largest error may also be this many roundings (8 eps) of the largest result of the formula on absolute values.
FLOOR_ROUNDINGS = 16.0
# Gain and spread may also be this many standard deviations of independent roundings.
SIGMAS = 5.0
# Gain and spread may also be this many roundings of sums in fp32, which may all have one direction: tensor cores
# truncate, and 3xTF32 takes three chains of products, as long as the head dim (measured on an H200: up to 2.1 at D 128, 4.1 at
# D 256).
SUM_ROUNDINGS, SUM_WIDTH = 4.0, 128  # so many up to this head dim, beyond it in proportion
# The norm of independent roundings is measured in this many random directions.
PROBES = 8

# Scores (their formula on absolute values) beyond this are not exact to more than 2^-12 in fp32: their rows are loose.
FAR = 4096.0
# The score of a loose row may be wrong by this many internal roundings of its formula on absolute values.
ROUNDINGS = 16.0
# A key whose share may not exceed e to this power does not make its row loose.
LEAST_SHARE = -40
# A row whose scores are all below this may count as one without keys: in powers of two such scores overflow.
LOWEST = -2e38
# A key weight below this counts as zero.
LEAST_WEIGHT = 2.0**-126

# A rounding error counts as uniform between -1 and 1 roundings: this is its standard deviation.
UNIFORM = 3.0**-0.5
# The sum of a row of rounded P depends on the row's offset between two powers of two: it is computed at this many.
PHASES = 8
